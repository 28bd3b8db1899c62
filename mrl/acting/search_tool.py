"""A tool that finds passages in an index on disk, with SQLite's full-text search. Needs no network."""

import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from mrl.acting.tool import Tool
from mrl.errors import ConfigError
from mrl.whole_file import appears_whole

SEARCH = "search"
INDEX_KEY = "rollout.turns.index"
MOST = 10  # passages in an answer
LONGEST_PASSAGE = 1000  # characters of a passage that are shown
_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(title, text)"
_FIND = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"


def write_index(path: Path, passages: Iterable[tuple[str, str]]) -> int:
    """Writes titles and texts into a new index, which appears completely or not at all. Returns their number."""
    with appears_whole(path) as work:
        index = sqlite3.connect(work)
        index.execute(_TABLE)
        count = index.executemany("INSERT INTO passages VALUES (?, ?)", passages).rowcount
        index.commit()
        index.close()
    return max(count, 0)


def search_tool(path: str) -> Tool:
    """Makes the tool for the index at `path`, opened read-only. Raises ConfigError for a file that is not an index."""
    where = f"{INDEX_KEY}: {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: no such file; scripts/make_search_index.py writes one")
    index = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
    try:
        index.execute(_FIND, ('"a"', 1)).fetchall()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{where}: is not an index written by scripts/make_search_index.py: {error}") from error

    def search(query: str, most: int = 3) -> list:
        """Finds passages with words of the query, the best first.

        Args:
            query: words
            most: how many passages
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ValueError("the query has no word")
        # quoted, so that it contains no operator of the query language
        wanted = " OR ".join(f'"{word}"' for word in words)
        found = index.execute(_FIND, (wanted, max(1, min(most, MOST)))).fetchall()
        return [{"title": title, "text": text[:LONGEST_PASSAGE]} for title, text in found]

    return Tool.of(search, SEARCH)
