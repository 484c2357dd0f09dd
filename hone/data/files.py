"""Read dataset files: parquet, json (a list of objects), jsonl (one object per line), csv, tsv, and arrow.

A directory that `datasets.Dataset.save_to_disk` wrote is read like its arrow files.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.data import media
from hone.data.messages import plain
from hone.data.sharegpt import COLUMNS, SYSTEM, to_messages
from hone.errors import DataError, did_you_mean
from hone.progress import tracked
from hone.text import check_valid

SUFFIXES = (".parquet", ".json", ".jsonl", ".arrow", ".csv", ".tsv")
_TABLES = (".csv", ".tsv")
EVERY_COLUMN = ("*",)  # value of ``optional`` that reads every column
RowReader = Callable[..., "list[Row]"]  # function with the arguments of :func:`read_rows`
_MOST_LISTED = 10
_JSON = "utf-8-sig"  # some editors write a mark of the byte order
_ROWS, _ROWS_WITH_MEDIA = 4096, 64  # rows of a parquet file that are in memory at a time
_OF_CHATS = {"role", "from", "function", "parameters"}
_OF_HONE = (
    "reward_model", "extra_info", "agent_name",
    "tools_kwargs", "tool_selection", "interaction_kwargs", "environment", "verifiers",
)  # fmt: skip
"""Columns that are read for themselves, and fields of extra_info that steer an episode: no column replaces them."""
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Row:
    """One row of a dataset file."""

    uid: str  # ``<file stem>:<row number>``, the same in every run over the same files
    where: str  # file and row number, for error messages
    values: dict[str, Any]  # column name to plain Python value
    folder: Path | None = None  # folder of the file, where relative paths of images start; None: the current one

    def others(self, *keys: str) -> dict[str, Any]:
        """Return the columns that a reward function may take besides ``keys``: the prompt, the data source, images."""
        return {name: plain(value) for name, value in self.values.items() if name not in {*keys, *_OF_HONE}}


@dataclass
class BadLines:
    """Lines of JSON-lines files that are not JSON, in the order in which they were read."""

    first: list[tuple[Path, int, str]] = field(default_factory=list)  # file, line number and reason of the first ten
    count: int = 0  # number of all

    def add(self, path: Path, number: int, reason: str) -> None:
        self.count += 1
        if self.count <= _MOST_LISTED:
            self.first.append((path, number, reason))


def read_rows(
    files: Sequence[str | Path] | str | Path,
    *,
    required: Sequence[str],
    optional: Sequence[str] = (),
    defaults: Mapping[str, Any] | None = None,
    max_rows: int = -1,
    bad_lines: BadLines | None = None,
    as_stored: bool = False,
    refused: Collection[str] = (),
    answer_key: str | None = None,
) -> list[Row]:
    """Read the named columns of all ``files``, in order.

    Conversations in ShareGPT's form become chat messages. Where a file lacks ``messages``, its column ``conversations`` is read
    under that name.

    Args:
        required: columns that every file must have.
        optional: columns that are read if they exist; :data:`EVERY_COLUMN` reads all.
        defaults: values of columns where a row has none.
        max_rows: read the first rows only; -1 reads all.
        bad_lines: collects the lines of JSON lines that are not JSON, which are left out; None raises an error for the first.
        as_stored: return columns and values as the files have them.
        refused: kinds of media (:data:`~hone.data.media.KINDS`) that no row may have, in any column.
        answer_key: column of the right answer, see :func:`with_answer`; every file must have it.

    Raises:
        MediaError: a row has media of a refused kind.
        DataError: no file given, a file is missing, unreadable, of another format or empty, or a required column is missing.
    """
    listed = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    paths = [part for path in listed for part in _parts(path)]
    if not paths:
        raise DataError("no dataset file is given", fix="data.train_files=PATH (parquet, json or jsonl)")
    stems = [path.stem for path in paths]
    rows: list[Row] = []
    if optional == EVERY_COLUMN:
        optional = tuple(dict.fromkeys(column for path in paths for column in _columns(path)))
    optional = (*optional, *(defaults or {}), *answer_columns(answer_key))
    wanted = {*required, *optional}
    more = () if as_stored else (SYSTEM, *(other for name in wanted for other in COLUMNS.get(name, ())))
    more += tuple(column for kind in refused for column in media.COLUMNS[kind])
    for number, path in enumerate(paths):
        looks = bool(refused) and _may_have_media(path)
        name = path.stem if stems.count(path.stem) == 1 else f"{path.stem}.{number}"
        left = None if max_rows < 0 else max_rows - len(rows)
        records = itertools.islice(_records(path, required, (*optional, *more), bad_lines), left)
        for index, values in enumerate(records):
            if index == 0 and answer_key is not None and not {*answer_columns(answer_key)} & values.keys():
                _check_columns(path, _columns(path), (answer_key,))
            where = f"{path}, row {index}"
            if looks:
                media.refuse_media(values, where, refused)
            read = values if as_stored else to_messages(_under_wanted_names(values, wanted), where)
            chosen = with_answer({column: value for column, value in read.items() if column in wanted}, answer_key)
            rows.append(Row(f"{name}:{index}", where, {**(defaults or {}), **chosen}, path.parent))
    return rows


def file_list(files: Any) -> list[str]:
    """Convert the value of a key of files to a list: None, a path or several."""
    return [files] if isinstance(files, str) else list(files or ())


def _may_have_media(path: Path) -> bool:
    """Return whether the types of a file's columns allow images, videos or sound."""
    if path.suffix != ".parquet":
        return True
    try:
        schema = pq.read_schema(path)
    except (pa.ArrowException, OSError):
        return True  # reading the rows says what is wrong
    return any(field.name in media.EVERY_COLUMN or _holds_parts(field.type) for field in schema)


def _holds_parts(kind: pa.DataType) -> bool:
    """Return whether a value of an Arrow type may be messages whose contents are lists of parts."""
    if not hasattr(kind, "value_type"):
        return isinstance(kind, pa.BaseExtensionType)
    message = kind.value_type
    if not pa.types.is_struct(message):
        return isinstance(message, pa.BaseExtensionType) or hasattr(message, "value_type")
    content = message.get_field_index("content")
    return content >= 0 and not (
        pa.types.is_string(message.field(content).type) or pa.types.is_large_string(message.field(content).type)
    )


def _under_wanted_names(values: dict[str, Any], wanted: set[str]) -> dict[str, Any]:
    """Return a row in which a wanted column that the file lacks is read from the column named in its place."""
    for name in wanted & COLUMNS.keys():
        other = next((column for column in COLUMNS[name] if column in values), None)
        if name not in values and other is not None:
            values[name] = values[other] if other in wanted else values.pop(other)
    return values


def read_all(files: Sequence[str | Path] | str | Path, bad_lines: BadLines | None = None, **options: Any) -> list[Row]:
    """Read every column of all ``files``, in order; ``options`` (as_stored, answer_key) and errors as of :func:`read_rows`."""
    rows: list[Row] = []
    listed = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    files = [part for path in listed for part in _parts(path)]
    for file in tracked(files, "reading files", len(files)):
        columns = _columns(file)
        if not options.get("as_stored"):
            columns += [name for name, others in COLUMNS.items() if name not in columns and {*others} & {*columns}]
        rows += read_rows(file, required=(), optional=columns, bad_lines=bad_lines, **options)
    return rows


def count_rows(files: Sequence[str | Path], max_rows: int = -1) -> int:
    """Return how many rows :func:`read_rows` finds, at most ``max_rows``; of parquet it reads only the end of a file."""
    count = 0
    for path in (part for file in files for part in _parts(Path(file))):
        left = None if max_rows < 0 else max(0, max_rows - count)
        if path.suffix == ".parquet" and path.is_file():
            rows = pq.read_metadata(path).num_rows
            count += rows if left is None else min(rows, left)
        else:
            count += sum(1 for _ in itertools.islice(_records(path, (), (), None), left))
    return count


NO_SOURCE = "default"  # data source of rows without a column of data sources; a reward function of the run scores them
ANSWER_COLUMNS = ("answer", "ground_truth", "solution", "target", "label")
"""Columns that may hold the right answer; none is taken without ``data.answer_key``."""


def answer_columns(answer_key: str | None) -> tuple[str, ...]:
    """Return the columns that may hold the right answer named by a key: itself, or the one whose field it is."""
    return () if answer_key is None else (answer_key, answer_key.partition(".")[0])


def column_of(values: Mapping[str, Any], name: str) -> Any:
    """Return a column, or a field of a column of objects, as in ``extra_info.question``."""
    value: Any = values
    for part in [name] if name in values else name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def with_answer(values: dict[str, Any], answer_key: str | None) -> dict[str, Any]:
    """Return a row whose ``reward_model.ground_truth`` is the column ``answer_key``; unchanged without a key."""
    truth = {} if answer_key is None else {"reward_model": {"ground_truth": column_of(values, answer_key)}}
    return {**values, **truth}


def _columns(path: Path) -> list[str]:
    """Return the columns of a file (for JSON, of all its rows); empty where :func:`read_rows` will report an error."""
    try:
        if path.suffix == ".parquet":
            return pq.read_schema(path).names
        if path.suffix == ".arrow":
            return _open_arrow(path).schema.names
        if path.suffix.lower() in _TABLES:
            return list(next(_csv(path, ())))
        records = _json_records(path, BadLines()) if path.suffix in SUFFIXES else ()
        return list(dict.fromkeys(name for record, _ in records if isinstance(record, dict) for name in record))
    except (pa.ArrowException, OSError, UnicodeDecodeError, DataError):
        return []


def _records(
    path: Path, required: Sequence[str], optional: Sequence[str], bad_lines: BadLines | None
) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        raise _not_a_file(path)
    if path.suffix not in SUFFIXES and path.suffix.lower() not in _TABLES:
        kind = f"ends in '{path.suffix}'" if path.suffix else "has no file ending"
        forms = f"dataset files end in {', '.join(SUFFIXES)}; a dataset of the hub is named ORG/NAME"
        raise DataError(f"'{path}' {kind}", fix=forms)
    if not path.exists():
        raise DataError(f"dataset file '{path}' does not exist", fix=_nearby(path))
    if path.suffix in (".parquet", ".arrow"):
        return (_parquet if path.suffix == ".parquet" else _arrow)(path, required, optional)
    if path.suffix.lower() in _TABLES:
        return _csv(path, required)
    return _json(path, required, optional, bad_lines)


def _parquet(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with pq.ParquetFile(path) as file:
            columns = file.schema_arrow.names
            _check_columns(path, columns, required)
            if file.metadata.num_rows == 0:
                raise _empty(path)
            wanted = [name for name in dict.fromkeys((*required, *optional)) if name in columns]
            first = 0
            size = _ROWS_WITH_MEDIA if {*wanted} & {*media.EVERY_COLUMN} else _ROWS
            for batch in file.iter_batches(batch_size=size, columns=wanted):
                try:
                    yield from _plain_rows(batch)
                except UnicodeDecodeError:
                    raise _not_utf8(path, batch, first) from None
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error


def _arrow(path: Path, required: Sequence[str], optional: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        reader = _open_arrow(path)
        columns = reader.schema.names
        _check_columns(path, columns, required)
        wanted = [name for name in dict.fromkeys((*required, *optional)) if name in columns]
        first = 0
        for batch in _batches(reader):
            chosen = batch.select(wanted)
            try:
                yield from _plain_rows(chosen)
            except UnicodeDecodeError:
                raise _not_utf8(path, chosen, first) from None
            first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(path, error) from error
    if not first:
        raise _empty(path)


def _plain_rows(batch: pa.RecordBatch) -> Iterable[dict[str, Any]]:
    """Return the rows of a batch; nulls that Arrow adds to objects are looked for only where there are some."""
    return (
        map(_without_added_nulls, batch.to_pylist()) if any(map(_has_inner_nulls, batch.columns)) else batch.to_pylist()
    )


def _has_inner_nulls(values: pa.Array) -> bool:
    if pa.types.is_struct(values.type):
        return any(part.null_count or _has_inner_nulls(part) for part in values.flatten())
    if not (pa.types.is_list(values.type) or pa.types.is_large_list(values.type)):
        return values.type.num_fields > 0 or isinstance(values.type, pa.BaseExtensionType)  # others may have some
    inner = values.flatten()
    return bool(inner.null_count or _has_inner_nulls(inner))


def _without_added_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose messages and tools have no nulls: Arrow gives each object the keys of all."""
    return {name: _without_nulls(value) if _is_chat(value) else value for name, value in values.items()}


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and bool(_OF_CHATS & value[0].keys())


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _open_arrow(path: Path) -> Any:
    """Return a reader of an arrow stream (as `datasets` writes it) or an arrow file, mapped into memory."""
    source = pa.memory_map(str(path))
    try:
        return pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_file(source)


def _batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    else:
        yield from reader


def _parts(path: Path) -> list[Path]:
    """Return the arrow files of a directory that ``save_to_disk`` wrote, in order; any other path alone."""
    state = path / "state.json"
    if not state.is_file():
        return [path]
    try:
        return [path / part["filename"] for part in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the directory's state.json cannot be read: {error}", where=str(path), fix="save the dataset again"
        ) from error


def _not_a_file(path: Path) -> DataError:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(part.name for part in path.iterdir() if (part / "state.json").is_file())
        return DataError(
            f"'{path}' holds several splits: {', '.join(splits)}",
            fix=f"name one, for example {path / (splits or ['train'])[0]}",
        )
    names = sorted(file.name for file in path.iterdir() if file.suffix in SUFFIXES)
    fix = f"name the file: {path / names[0]}" if names else f"it has no file that ends in {', '.join(SUFFIXES)}"
    return DataError(f"'{path}' is a directory, not a dataset file", fix=fix)


def _json(
    path: Path, required: Sequence[str], optional: Sequence[str], bad_lines: BadLines | None
) -> Iterator[dict[str, Any]]:
    number = -1
    for number, (record, may_be_invalid) in enumerate(_json_records(path, bad_lines)):
        if not isinstance(record, dict):
            raise DataError(
                f"row {number} is a {type(record).__name__}, not an object",
                where=str(path),
                fix="make every row a JSON object whose keys are the columns",
            )
        if not record.keys() >= {*required}:
            _check_columns(path, record, required, row=number)
        values = {name: record[name] for name in (*required, *optional) if name in record}
        if may_be_invalid:
            check_valid(values, f"{path}, row {number}")
        yield values
    if number < 0:
        raise _empty(path)


def _csv(path: Path, required: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of text, whose first line names the columns; an empty cell is null."""
    csv.field_size_limit(2**31 - 1)
    number = -1
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            header = stream.readline()
            stream.seek(0)
            separator = "\t" if path.suffix.lower() == ".tsv" else ";" if header.count(";") > header.count(",") else ","
            reader = csv.DictReader(stream, delimiter=separator, restval="", strict=True)
            names = reader.fieldnames or ()
            if len({*names}) < len(names):
                raise DataError(f"two columns have one name: {', '.join(names)}", where=str(path), fix="rename one")
            _check_columns(path, names, required)
            for number, cells in enumerate(reader):
                if None in cells:
                    raise DataError(
                        f"more cells than the {len(cells) - 1} columns; the first too many: {cells[None][0]!r:.60}",
                        where=f"{path}, row {number} (line {reader.line_num})",
                        fix='quote a cell that holds a separator or a line break: "a, b"',
                    )
                yield {name: cell if cell.strip() else None for name, cell in cells.items()}
    except UnicodeDecodeError as error:
        raise _unreadable(path, error) from error
    except (OSError, csv.Error) as error:
        place = f" (after row {number}; a table is text in UTF-8, and a cell ends with the quote that it begins with)"
        raise _unreadable(path, f"{error}{place}") from error
    if number < 0:
        raise _empty(path)


def _json_records(path: Path, bad_lines: BadLines | None) -> Iterator[tuple[Any, bool]]:
    """Yield the values of a document that is a list, or of JSON lines, one line in memory at a time; True: it may hold half of a
    surrogate pair.
    """
    try:
        if path.suffix == ".json":
            text = path.read_text(encoding=_JSON)
            try:
                whole = json.loads(text)
            except json.JSONDecodeError as error:
                if error.msg != "Extra data":  # several documents: JSON lines in a .json file
                    raise
            else:
                may_be_invalid = _SURROGATE_ESCAPE.search(text) is not None
                yield from ((value, may_be_invalid) for value in (whole if isinstance(whole, list) else [whole]))
                return
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, too many digits
        raise _unreadable(path, error) from error
    try:
        with path.open(encoding=_JSON) as lines:  # strings may contain other line separators
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    try:
                        value = json.loads(line)
                    except (ValueError, RecursionError) as error:
                        if bad_lines is None:
                            raise _unreadable(path, f"line {number}: {error}") from error
                        bad_lines.add(path, number, str(error))
                    else:
                        yield value, "\\u" in line and _SURROGATE_ESCAPE.search(line) is not None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _check_columns(path: Path, columns: Iterable[str], required: Sequence[str], row: int | None = None) -> None:
    columns = list(columns)
    for name in required:
        if name not in columns and not {*columns} & {*COLUMNS.get(name, ())}:
            at = "" if row is None else f" in row {row}"
            raise DataError(
                f"no column '{name}'{at}; the columns are {', '.join(columns) or '(none)'}",
                where=str(path),
                fix=_column_fix(path, name, columns),
            )


def _column_fix(path: Path, name: str, columns: Sequence[str]) -> str:
    convertible = {"messages", "conversations", "conversation", "instruction", "question", "completion"} & {*columns}
    key = {"prompt": "data.prompt_key", "messages": "data.messages_key"}.get(name)
    if key is None:
        return f"{did_you_mean(name, columns)} Keys such as data.prompt_key and data.answer_key name columns."
    if convertible:
        target = " --to messages" if name == "messages" else ""
        return (
            f"hone data convert {path}{target} --out NEW.parquet makes the column; or name another column: {key}=COLUMN"
        )
    nearest = did_you_mean(name, columns)
    return (
        f"{nearest} Name it: {key}=COLUMN" if nearest.endswith("?") else f"name the column that holds it: {key}=COLUMN"
    )


def _not_utf8(path: Path, batch: pa.RecordBatch, first: int) -> DataError:
    """Return the error of the first row of a batch whose text is not UTF-8, as lone surrogates are not."""
    for number in range(batch.num_rows):
        try:
            batch.slice(number, 1).to_pylist()
        except UnicodeDecodeError as error:
            return DataError(
                f"the text is not UTF-8: {error.reason} (bytes {error.object[error.start : error.start + 3]!r})",
                where=f"{path}, row {first + number}",
                why="no tokenizer accepts it",
                fix="write the row again with valid text, for example with U+FFFD in place of these bytes",
            )
    raise AssertionError("unreachable")


def _empty(path: Path) -> DataError:
    return DataError("the file has no rows", where=str(path), fix="name a file with data, or make one: hone data make")


def _unreadable(path: Path, reason: object) -> DataError:
    if isinstance(reason, UnicodeDecodeError):
        return DataError(
            f"the text is not UTF-8: {reason}",
            where=str(path),
            fix=f"save it as UTF-8; of Windows or Latin-1: iconv -f WINDOWS-1252 -t UTF-8 {path.name} > NEW{path.suffix}",
        )
    return DataError(f"cannot be read as {path.suffix[1:]}: {reason}", where=str(path), fix="write the file again")


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f"the folder '{path.parent}' does not exist either; check the path"
    names = sorted(file.name for file in path.parent.iterdir() if file.suffix in SUFFIXES)
    return did_you_mean(path.name, names) if names else f"'{path.parent}' holds no dataset file; check the path"


def cache_directory() -> Path:
    """Return the folder of what is computed once: HONE_CACHE, or hone below XDG_CACHE_HOME (~/.cache)."""
    base = os.environ.get("HONE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone"
    return Path(base).expanduser()
