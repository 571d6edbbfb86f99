"""The file format of the kernel cache: one entry, checked as a whole, made of JSON and of named bytes.

A file is a header (magic, format version, length of the body, SHA-256 of all else) and a body (length of the JSON, the
JSON, the bytes of the blobs). Whatever is not exactly what was written raises :class:`Damaged`, with the reason.

Worked example::

    >>> packed = pack(Entry("triton", "5f0c", {"shared": 0}, {"source": b"..."}))
    >>> unpack(packed, "5f0c").blobs["source"]
    b'...'
    >>> unpack(packed[:-1], "5f0c")
    Traceback (most recent call last):
    dynafuse.cache.entry.Damaged: 1 byte is missing
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAGIC = b"dynafuse"
FORMAT = 1
"""Raised by every change of the format: entries of another version are not read."""

HEADER = struct.Struct("<8sIIQ32s")  # magic, format, nothing, length of the body, SHA-256
_CHECKED = HEADER.size - hashlib.sha256().digest_size  # of the header, what the digest covers
_LENGTH = struct.Struct("<I")


class Damaged(ValueError):
    """Bytes that are not an entry, or not the one that was asked for; the text says why."""


@dataclass(frozen=True)
class Entry:
    """What is kept under a key: ``data`` as JSON can hold it, and ``blobs`` of bytes by name."""

    kind: str  # triton | interpreter | nvfuser | plan | measurement | archive
    key: str
    data: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, bytes] = field(default_factory=dict)

    def expect(self, kind: str, region: str) -> None:
        """Raise ValueError unless this is an entry of a kind, of the region with a key."""
        if self.kind != kind or self.data["region"] != region:
            raise ValueError(f"it is a {self.kind} entry of region {self.data.get('region')}")


def pack(entry: Entry) -> bytes:
    """An entry as a file's content; equal entries give equal bytes."""
    sizes = [[name, len(blob)] for name, blob in entry.blobs.items()]
    fields = {"kind": entry.kind, "key": entry.key, "data": entry.data, "blobs": sizes}
    text = json.dumps(fields, separators=(",", ":")).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *entry.blobs.values()])
    return HEADER.pack(MAGIC, FORMAT, 0, len(body), _digest(len(body), body)) + body


def unpack(packed: bytes, key: str | None = None) -> Entry:
    """The entry of a file's content. Raises Damaged, also for an entry under another key than ``key``."""
    body = _checked(packed)
    try:
        (size,) = _LENGTH.unpack_from(body)
        fields = json.loads(body[_LENGTH.size:_LENGTH.size + size])
        entry = Entry(str(fields["kind"]), str(fields["key"]), fields["data"],
                      _blobs(fields["blobs"], body[_LENGTH.size + size:]))
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"the digest fits, the content does not: {type(error).__name__}: {error}") from None
    if key is not None and entry.key != key:
        raise Damaged(f"it is the entry of {entry.key}")
    return entry


def _digest(length: int, body: bytes | memoryview) -> bytes:
    """Of all of a file but the digest itself."""
    made = hashlib.sha256(HEADER.pack(MAGIC, FORMAT, 0, length, b"")[:_CHECKED])
    made.update(body)
    return made.digest()


def _checked(packed: bytes) -> bytes:
    """The body of a file whose header fits it."""
    if len(packed) < HEADER.size:
        raise Damaged(f"{len(packed)} bytes are no entry")
    magic, version, nothing, length, digest = HEADER.unpack_from(packed)
    if magic != MAGIC:
        raise Damaged("it is no entry of this cache")
    if version != FORMAT:
        raise Damaged(f"it has format {version}, not {FORMAT}")
    missing = length - (len(packed) - HEADER.size)
    if missing:
        amount = f"{abs(missing)} byte{'s are' if abs(missing) > 1 else ' is'}"
        raise Damaged(f"{amount} missing" if missing > 0 else f"{amount} too many")
    body = packed[HEADER.size:]
    if nothing or digest != _digest(length, body):
        raise Damaged("its digest does not fit")
    return body


def _blobs(sizes: Any, rest: bytes) -> dict[str, bytes]:
    blobs, start = {}, 0
    for name, size in sizes:
        if not isinstance(size, int) or not 0 <= size <= len(rest) - start:
            raise ValueError(f"blob {name!r} of {size} bytes")
        blobs[str(name)] = rest[start:start + size]
        start += size
    if start != len(rest):
        raise ValueError(f"{len(rest) - start} bytes belong to no blob")
    return blobs
