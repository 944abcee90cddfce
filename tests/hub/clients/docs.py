"""Run the Python of docs/publishing.md from top to bottom, with a tiny model under the base model's name."""

import contextlib
import io
import os
import re
from pathlib import Path

from common import WORK, report, state, tiny_llama
from huggingface_hub import ModelCard

PAGE = Path(__file__).parents[3] / "docs" / "publishing.md"


def main() -> None:
    tiny_llama().push_to_hub("tester/SmolLM2-135M-base")
    page = PAGE.read_text(encoding="utf-8").replace(
        "HuggingFaceTB/SmolLM2-135M", "tester/SmolLM2-135M-base"
    )
    blocks = re.findall(r"```python\n(.*?)```", page.replace("your-name/", "tester/"), re.S)
    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(WORK)
    names, said = {}, io.StringIO()
    with contextlib.redirect_stdout(said):
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
    card = ModelCard.load(WORK / "out" / "README.md")
    repos = [
        f"tester/{name}"
        for name in ("SmolLM2-135M-cone", "SmolLM2-135M-cone-lora", "cone-last-third")
    ]
    report(
        {
            "blocks": len(blocks),
            "said": said.getvalue(),
            "states": [state(repo) for repo in repos],
            "metrics": card.data.metrics,
            "patched": "hyper" in repr(names["other"]),
        }
    )


if __name__ == "__main__":
    main()
