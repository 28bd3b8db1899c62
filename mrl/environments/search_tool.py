"""A tool that finds passages in an index on the disk: SQLite's full text, which Python brings along. No network."""

import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from mrl.environments.tool import Tool
from mrl.errors import ConfigError
from mrl.whole_file import appears_whole

SEARCH = "search"
INDEX_KEY = "rollout.turns.index"
MOST = 10  # passages of an answer
LONGEST_PASSAGE = 1000  # characters of it that are shown
_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(title, text)"
_FIND = "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages), rowid LIMIT ?"


def write_index(path: Path, passages: Iterable[tuple[str, str]]) -> int:
    """Writes titles and texts into a new index, which appears whole; how many there are."""
    with appears_whole(path) as work:
        index = sqlite3.connect(work)
        index.execute(_TABLE)
        count = index.executemany("INSERT INTO passages VALUES (?, ?)", passages).rowcount
        index.commit()
        index.close()
    return max(count, 0)


def search_tool(path: str) -> Tool:
    """The tool over the index at `path`, which is opened to be read alone. Raises ConfigError for a file that is no
    index.
    """
    where = f"{INDEX_KEY}: {path}"
    if not Path(path).is_file():
        raise ConfigError(f"{where}: no such file; scripts/make_search_index.py writes one")
    index = sqlite3.connect(f"file:{quote(path)}?mode=ro&immutable=1", uri=True)
    try:
        index.execute(_FIND, ('"a"', 1)).fetchall()
    except sqlite3.DatabaseError as error:
        raise ConfigError(f"{where}: is no index that scripts/make_search_index.py wrote: {error}") from error

    def search(query: str, most: int = 3) -> list:
        """Finds passages with words of the query, the best first.

        Args:
            query: words
            most: how many passages
        """
        words = re.findall(r"\w+", query)
        if not words:
            raise ValueError("the query has no word")
        wanted = " OR ".join(f'"{word}"' for word in words)  # quoted: no operator of the index's own language
        found = index.execute(_FIND, (wanted, max(1, min(most, MOST)))).fetchall()
        return [{"title": title, "text": text[:LONGEST_PASSAGE]} for title, text in found]

    return Tool.of(search, SEARCH)
