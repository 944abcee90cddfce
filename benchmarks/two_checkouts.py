"""Times this checkout beside another one, in turns: prompts and decoding with a HierarchicalCache.

    git worktree add /tmp/base COMMIT
    python benchmarks/two_checkouts.py /tmp/base --length 8192 --json two_checkouts.json

Each checkout runs in a process of its own, with the same environment. The processes take turns, round by round, so that
other work on the machine disturbs both alike. Printed are the medians, their ratio, and the largest difference of the
logits. Weights are random: they change no time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def models(args) -> dict:
    """A patched model of SmolLM2's layer shape for each mechanism, by name."""
    import torch
    import transformers as hf

    import hf_hyperattn as ha
    from hf_hyperattn.mechanisms.sparse import Pages, Window

    sizes = dict(
        vocab_size=512,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=args.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=4 * args.length,
    )
    pages = Pages(near=64, top=16, page=16, summary="mean", query="previous", chunk=16)
    mechanisms = {
        "sparse": ha.SparseConfig((pages,) * 6 + (Window(near=256),) * 3),
        "hsa": ha.HsaConfig(windows=(16, 64, 256), refine_top_k=4),
        "hype": ha.HypeConfig(),
        "cone": ha.ConeConfig(),
    }
    result = {}
    for name in args.mechanisms:
        torch.manual_seed(0)
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)).eval().to(getattr(torch, args.dtype))
        result[name] = ha.patch_model(model, mechanisms[name], mode="replace")
    return result


def serve(args) -> None:
    """Answer commands on standard input: a mechanism and what to time; one line of JSON each."""
    import torch

    import hf_hyperattn as ha

    torch.set_num_threads(args.threads)
    known, states = models(args), {}
    ids = torch.randint(0, 512, (1, args.length), generator=torch.Generator().manual_seed(1))
    argument = (
        "cache" if "cache" in known[args.mechanisms[0]].forward.__doc__ else "past_key_values"
    )
    mask = torch.ones(1, args.length + 100_000, dtype=torch.long)
    if args.padding:
        mask[:, : args.padding] = 0

    def run(model, ids, cache):
        length = cache.get_seq_length() + ids.shape[1]
        given = {"attention_mask": mask[:, :length]} if args.padding else {}
        return model(ids, **{argument: cache}, logits_to_keep=1, **given).logits[:, -1]

    print("ready", flush=True)
    for line in sys.stdin:
        name, kind = line.split()
        model = known[name]
        with torch.no_grad():
            if kind == "prompt":
                cache = ha.HierarchicalCache(model)
                start = time.perf_counter()
                logits = run(model, ids, cache)
                seconds, states[name] = time.perf_counter() - start, cache
            else:
                cache = states[name]
                for _ in range(2):
                    logits = run(model, ids[:, :1], cache)
                start = time.perf_counter()
                for _ in range(args.steps):
                    logits = run(model, ids[:, :1], cache)
                seconds = (time.perf_counter() - start) / args.steps
        print(json.dumps([seconds, logits[0, :8].tolist()]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", nargs="?", help="the other checkout")
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=6, help="layers of the model")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of decoding")
    parser.add_argument("--prompts", type=int, default=3, help="rounds of prompts")
    parser.add_argument("--steps", type=int, default=16, help="tokens of a round")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--padding", type=int, default=0, help="tokens of padding at the left")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument(
        "--mechanisms", nargs="+", default=["sparse", "hsa"], help="what models are patched with"
    )
    parser.add_argument("--json", help="where to write the times")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args)
    here = HERE.parent.parent
    workers = {}
    for name, folder in (("base", Path(args.base).resolve()), ("here", here)):
        command = [sys.executable, str(HERE), "--serve", *sys.argv[2:]]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        workers[name] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )

    def ask(name: str, what: str):
        worker = workers[name]
        worker.stdin.write(what + "\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())

    for worker in workers.values():
        while worker.stdout.readline().strip() != "ready":
            pass
    results = {}
    for mechanism in args.mechanisms:
        for kind, rounds in (("prompt", args.prompts), ("step", args.rounds)):
            times, apart = {"base": [], "here": []}, 0.0
            for _ in range(rounds):
                answers = {name: ask(name, f"{mechanism} {kind}") for name in times}
                for name, (seconds, _) in answers.items():
                    times[name].append(seconds)
                pairs = zip(answers["base"][1], answers["here"][1], strict=True)
                apart = max(apart, *(abs(x - y) for x, y in pairs))
            medians = {name: statistics.median(of) for name, of in times.items()}
            lowest = {name: min(of) for name, of in times.items()}
            ratio, best = medians["here"] / medians["base"], lowest["here"] / lowest["base"]
            results[f"{mechanism} {kind}"] = {"times": times, "ratio": ratio, "apart": apart}
            print(
                f"{mechanism:8}{kind:8} base {1e3 * medians['base']:9.2f} ms   here {1e3 * medians['here']:9.2f} ms   "
                f"ratio {ratio:.3f} (lowest {best:.3f})   apart {apart:.1e}",
                flush=True,
            )
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    if args.json:
        Path(args.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
