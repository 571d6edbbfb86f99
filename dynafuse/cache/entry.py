"""The file format of the kernel cache: an entry of JSON and named bytes, with a digest over all of it.

A file is a header (magic, format version, length of the body, SHA-256 of all else) and a body (length of the JSON, the
JSON, the bytes of the blobs). Reading raises :class:`Damaged`, with the reason, unless the file is exactly as written.

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
"""The version of the format: entries of another version are not read."""

HEADER = struct.Struct("<8sIIQ32s")  # magic, format, zero, length of the body, SHA-256
_CHECKED = HEADER.size - hashlib.sha256().digest_size  # bytes of the header that the digest covers
_LENGTH = struct.Struct("<I")


class Damaged(ValueError):
    """Raised for bytes that are not an entry, or not the one that was requested; the message says why."""


@dataclass(frozen=True)
class Entry:
    """What is stored for a key: ``data`` that JSON can hold, and ``blobs`` of bytes by name."""

    kind: str  # triton | interpreter | nvfuser | plan | measurement | archive
    key: str
    data: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, bytes] = field(default_factory=dict)

    def expect(self, kind: str, region: str) -> None:
        """Check that this is an entry of a kind, of the region with a key.

        Args:
            kind: What the entry's ``kind`` has to be.
            region: What its ``data["region"]`` has to be: a region's key, which is not the entry's own.

        Raises:
            ValueError: It is another.
            KeyError: It is of the kind, and of no region.
        """
        if self.kind != kind or self.data["region"] != region:
            raise ValueError(f"it is a {self.kind} entry of region {self.data.get('region')}")


def pack(entry: Entry) -> bytes:
    """Return an entry as the content of a file; equal entries give equal bytes."""
    sizes = [[name, len(blob)] for name, blob in entry.blobs.items()]
    fields = {"kind": entry.kind, "key": entry.key, "data": entry.data, "blobs": sizes}
    text = json.dumps(fields, separators=(",", ":")).encode()
    body = b"".join([_LENGTH.pack(len(text)), text, *entry.blobs.values()])
    return HEADER.pack(MAGIC, FORMAT, 0, len(body), _digest(len(body), body)) + body


def unpack(packed: bytes, key: str | None = None) -> Entry:
    """Return the entry of a file's content.

    Args:
        packed: All bytes of the file.
        key: The key that the entry has to be of; None takes any.

    Raises:
        Damaged: The bytes are not exactly as written, or the entry is that of another key.
    """
    body = _checked_body(packed)
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
    """Return the digest of a file, over all of it but the digest itself."""
    sha = hashlib.sha256(HEADER.pack(MAGIC, FORMAT, 0, length, b"")[:_CHECKED])
    sha.update(body)
    return sha.digest()


def _checked_body(packed: bytes) -> bytes:
    """Return the body of a file. Raises Damaged if the header does not fit it."""
    if len(packed) < HEADER.size:
        raise Damaged(f"{len(packed)} bytes are no entry")
    magic, version, reserved, length, digest = HEADER.unpack_from(packed)
    if magic != MAGIC:
        raise Damaged("it is no entry of this cache")
    if version != FORMAT:
        raise Damaged(f"it has format {version}, not {FORMAT}")
    missing = length - (len(packed) - HEADER.size)
    if missing:
        amount = f"{abs(missing)} byte{'s are' if abs(missing) > 1 else ' is'}"
        raise Damaged(f"{amount} missing" if missing > 0 else f"{amount} too many")
    body = packed[HEADER.size:]
    if reserved or digest != _digest(length, body):
        raise Damaged("its digest does not fit")
    return body


def _blobs(sizes: Any, rest: bytes) -> dict[str, bytes]:
    """Cut the blobs out of the bytes behind the JSON. Raises ValueError if their sizes do not add up."""
    blobs, start = {}, 0
    for name, size in sizes:
        if not isinstance(size, int) or not 0 <= size <= len(rest) - start:
            raise ValueError(f"blob {name!r} of {size} bytes")
        blobs[str(name)] = rest[start:start + size]
        start += size
    if start != len(rest):
        raise ValueError(f"{len(rest) - start} bytes belong to no blob")
    return blobs
