"""The experiment with MiniLM's shared queries and keys: its page says what its results say."""

from experiments import collaborative, collaborative_tables, draw, store


def test_the_page_says_what_the_results_say():
    text, results = collaborative_tables.PAGE.read_text(), store.load("collaborative")
    for name, table in collaborative_tables.TABLES.items():
        assert draw.put(text, name, table(results)) == text, name


def test_the_results_are_of_the_settings():
    results = store.load("collaborative")
    assert results["settings"] == collaborative.SETTINGS
    wanted = [name for name, _ in collaborative.runs(collaborative.SETTINGS, results["runs"])]
    assert list(results["runs"]) == [name for name in wanted if name in results["runs"]]


def test_full_rank_loses_nothing_and_ranks_save_parameters():
    runs = store.load("collaborative")["runs"]
    full = runs["weights, rank 384"]
    assert (
        full["cosine"]["least"] == 1 and full["probe"]["right"] == runs["stock"]["probe"]["right"]
    )
    for way in collaborative.WAYS:
        sizes = [
            runs[name]["bytes"]
            for rank in (288, 192, 96)
            if (name := f"{way}, rank {rank}") in runs
        ]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] < runs["stock"]["bytes"]
