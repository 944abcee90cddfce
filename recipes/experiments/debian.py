"""Data that Debian packages carry: found where they are installed, else unpacked into a cache, without root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

#: The Bible in the King James version; the program reads the text out of its compressed data.
BIBLE = ("bible-kjv", "bible-kjv-text")
#: WordNet 3.0.
WORDNET = ("wordnet-base",)


def bible_text() -> str:
    """The King James Bible, one verse a line, each led by its place ("Ge1:1 ").

    Raises:
        ValueError: it is neither installed nor can be fetched.
    """
    program = shutil.which("bible")
    options: list[str] = []
    if program is None:
        root = unpacked(BIBLE)
        program, options = str(root / "usr/bin/bible"), ["-p", str(root / "usr/lib")]
    # The program breaks lines to the terminal's width unless it is told one.
    done = subprocess.run(
        [program, *options, "-f", "-l", "100000", "gen1:1-rev22:21"], capture_output=True, text=True
    )
    if done.returncode or len(done.stdout) < 4_000_000:
        raise ValueError(
            f"{program} gave {len(done.stdout)} characters of the Bible, 4.4 million are expected; {advice(BIBLE)}"
        )
    return done.stdout


def wordnet_nouns() -> Path:
    """The file `data.noun` of WordNet.

    Raises:
        ValueError: it is neither installed nor can be fetched.
    """
    inside = "usr/share/wordnet/data.noun"
    installed = Path("/") / inside
    return installed if installed.exists() else unpacked(WORDNET) / inside


def unpacked(packages: tuple[str, ...]) -> Path:
    """A folder that holds what the packages would install, made with `apt-get download` once.

    Raises:
        ValueError: apt-get or dpkg is missing, or the package cannot be fetched; the line says how to get it.
    """
    folder = cache() / packages[-1]
    if folder.exists():
        return folder
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise ValueError(
            f"{packages[-1]} is not installed, and there is no apt-get here; {advice(packages)}"
        )
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    scratch.mkdir(parents=True)
    try:
        fetch(packages, scratch)
        try:
            scratch.rename(folder)
        except OSError:  # another process was first
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def fetch(packages: tuple[str, ...], folder: Path) -> None:
    """Download the packages and unpack them into the folder."""
    done = subprocess.run(
        ["apt-get", "download", *packages], cwd=folder, capture_output=True, text=True
    )
    files = sorted(folder.glob("*.deb"))
    if done.returncode or len(files) < len(packages):
        said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(
            f"apt-get download {' '.join(packages)} failed ({said}); {advice(packages)}"
        )
    for file in files:
        subprocess.run(["dpkg", "-x", str(file), str(folder)], check=True, capture_output=True)
        file.unlink()


def cache() -> Path:
    """HF_HYPERATTN_CACHE, or hf_hyperattn under the user's cache folder."""
    named = os.environ.get("HF_HYPERATTN_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named) if named else home / "hf_hyperattn"


def advice(packages: tuple[str, ...]) -> str:
    """The command that installs the packages."""
    return f"on Debian or Ubuntu: apt-get update && apt-get install {' '.join(packages)}"
