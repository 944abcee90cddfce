"""`hyperattn push`: upload a saved model, adapter or config to the Hub.

Before the upload, the folder is loaded, saved again and compared bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
from safetensors import safe_open
from torch import Tensor

import hub_cards
from hf_hyperattn.address import NAME, VERSION
from hf_hyperattn.config import CONFIG_NAME, HyperAttnConfig
from hf_hyperattn.integration.export.repositories import MANIFEST, auto_classes
from hf_hyperattn.integration.loading.checkpoint_files import (
    check_weights,
    class_of,
    errors_as,
    files_of,
    load_config,
    regular_file,
)
from hf_hyperattn.utils.files import read_json
from hf_hyperattn.utils.text import short
from hub_cards.beside import CARD, read_made
from hub_cards.results import is_hub_id

from ..shared.adapters import ADAPTER, load_adapter
from ..shared.inputs import silence_transformers
from .card import read_card

#: Names of weight files. Old ones are deleted from the repository, because they could be loaded
#: together with the new ones, or instead of them.
WEIGHTS = re.compile(
    r"(adapter_)?(model|pytorch_model)([.-][\w.-]+)?\.(safetensors|bin)(\.index\.json)?"
)


def run(args: argparse.Namespace) -> None:
    """Check and upload.

    Raises:
        ValueError: Bad input, a folder that does not reload exactly, or an error of the Hub.
    """
    silence_transformers()
    if not is_hub_id(args.repo):
        raise ValueError(
            f"{args.repo!r} is no repository of the Hub; allowed: a name of the form owner/name"
        )
    # Making the card is fast, and fails for a folder that is not ours.
    folder, facts, _ = read_card(args)
    # Steps: choose files, check that they reload exactly, upload, report.
    files, left_out = files_to_push(folder)
    tensors = check_reload(folder, files)
    report: dict[str, Any] = {
        "repo": args.repo,
        "private": args.private,
        "dry_run": args.dry_run,
        "tensors": tensors,
        "files": sorted({*files, CARD}),
        "left_out": left_out,
        "deleted": [],
        "url": None,
        "card_stays": has_own_card(folder),
    }
    if not args.dry_run:
        try:
            report |= upload_files(args, folder, facts, files)
        # The Hub client raises many types; the user needs one line with the next step.
        except Exception as error:
            raise ValueError(hub_cards.explain_hub_error(error, f"push to {args.repo}")) from error
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"{folder}: comes back exactly ({tensors} tensors)")
    print(
        f"{'would push' if args.dry_run else 'pushed'} to {args.repo}: {', '.join(report['files'])}"
    )
    for label, names in (
        ("left out, not part of the checkpoint", left_out),
        ("deleted on the Hub", report["deleted"]),
    ):
        if names:
            print(f"{label}: {', '.join(map(repr, names))}")
    # The facts appear only on a generated card.
    if args.facts is not None and report["card_stays"]:
        print("--facts says nothing: README.md was written by hand and stays")
    if report["url"]:
        print(report["url"])


def has_own_card(folder: Path) -> bool:
    """Return whether a person wrote the README.md in a folder."""
    return os.path.lexists(folder / CARD) and read_made(folder / CARD) is None


def files_to_push(folder: Path) -> tuple[dict[str, Path], list[str]]:
    """Find the files to upload.

    Returns:
        The files by name, and the names of all other files in the folder.

    Raises:
        ValueError: An exported file was changed, or a link leads out of the folder.
    """
    files, others = files_of(folder)
    exported = read_manifest(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    # An export is code that others run with trust_remote_code, so it must be unchanged.
    for name, digest in exported.items():
        files[name] = regular_file(folder, name)
        if name != CARD and hashlib.sha256(files[name].read_bytes()).hexdigest() != digest:
            raise ValueError(
                f"{folder / name} was changed since `hyperattn export` wrote it; export it again"
            )
    if exported:
        files[MANIFEST] = regular_file(folder, MANIFEST)
    return files, sorted(name for name in others if name not in files and not name.startswith("."))


def read_manifest(path: Path) -> dict[str, str]:
    """Return the SHA-256 of every exported file by name.

    Raises:
        ValueError: `hyperattn export` did not write the file.
    """
    digests = read_json(path).get("sha256", {})
    if not isinstance(digests, dict) or not all(
        isinstance(digest, str) for digest in digests.values()
    ):
        raise ValueError(
            f"{path} has sha256={short(digests)}; allowed: an object of file names and digests, as `hyperattn export` "
            "writes it"
        )
    return digests


def check_reload(folder: Path, files: dict[str, Path]) -> int:
    """Load the folder, save it again, and compare every tensor bit by bit.

    Returns:
        The number of tensors.

    Raises:
        ValueError: Something does not load, or changes.
    """
    # A folder with only a HyperAttnConfig has no tensors to compare.
    if ADAPTER not in files and "config.json" not in files:
        config = HyperAttnConfig.from_pretrained(folder)
        if HyperAttnConfig.from_dict(config.to_dict()) != config:
            raise ValueError(
                f"{folder / CONFIG_NAME} does not come back as it is; save the config again"
            )
        return 0
    with (
        tempfile.TemporaryDirectory() as again,
        errors_as(f"{folder} does not reload exactly, and is not pushed"),
    ):
        model = load_adapter(folder) if ADAPTER in files else load_model(folder, files)
        model.save_pretrained(again)
        before = find_tensors(folder)
        after = find_tensors(Path(again))
        # Tensors are read one pair at a time, since two models may not fit into memory.
        changed = [
            name
            for name in before.keys() & after.keys()
            if not is_same_tensor(read_tensor(before[name], name), read_tensor(after[name], name))
        ]
        for problem, names in (
            ("is missing in the folder", after.keys() - before.keys()),
            ("is not taken by the model", before.keys() - after.keys()),
            ("comes back with other numbers", changed),
        ):
            if names:
                raise ValueError(
                    f"{min(names)} {problem}; save it again with this version of the package"
                )
    return len(before)


def load_model(folder: Path, files: dict[str, Path]) -> Any:
    """Load the model in a folder as the class that was saved."""
    check_weights(folder, files)
    config = load_config(folder, str(folder))
    known = {cls.__name__: cls for cls in auto_classes(config).values()}
    cls: Any = known.get((config.architectures or [""])[0]) or class_of(config)
    return cls.from_pretrained(folder, dtype="auto")


def find_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor of the safetensors files in a folder."""
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with errors_as(f"{path} is damaged"), safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file."""
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def is_same_tensor(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have equal shapes, dtypes and bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Bytes are compared because NaN does not equal NaN.
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def upload_files(
    args: argparse.Namespace, folder: Path, facts: dict, files: dict[str, Path]
) -> dict[str, Any]:
    """Upload the files and the card in one commit.

    A README.md that a person wrote is kept, in the folder and on the Hub.

    Returns:
        The entries of the report that the upload changes.
    """
    api = huggingface_hub.HfApi()
    # An existing repository keeps its visibility, so `private` must be checked afterwards.
    repo = api.create_repo(args.repo, private=args.private or None, exist_ok=True).repo_id
    if args.private and not api.repo_info(repo).private:
        raise ValueError(
            f"{repo} exists and is public; make it private there, or leave --private out"
        )
    there = api.list_repo_files(repo)
    # Read the state of the card now: `write_card` may create the file.
    own = stays = has_own_card(folder)
    hub_cards.write_card(folder, repo_id=repo, **facts)
    files = files | {CARD: folder / CARD}
    # A card that a person edited on the Hub is left out of the commit.
    if not own and CARD in there and read_made(Path(api.hf_hub_download(repo, CARD))) is None:
        del files[CARD]
        stays = True
    # Old shards or pickles would otherwise be loaded with the new weights.
    deleted = sorted(name for name in there if WEIGHTS.fullmatch(name) and name not in files)
    operations: list[Any] = [CommitOperationAdd(name, path) for name, path in sorted(files.items())]
    operations += [CommitOperationDelete(name) for name in deleted]
    # One commit, so that nobody can download a mixture of old and new files.
    commit = api.create_commit(repo, operations, commit_message=f"Upload with {NAME} {VERSION}")
    url = str(commit.commit_url)
    return {
        "repo": repo,
        "files": sorted(files),
        "deleted": deleted,
        "url": url,
        "card_stays": stays,
    }
