"""What a file holds that is no model file: how downloads usually fail, by the first bytes."""

from __future__ import annotations

from nsm_core.formats.random_access import RandomAccessFile

HEAD_BYTES = 512
MAX_SHOWN = 60  # characters of a short text
_OLD_PYTORCH = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"7z\xbc\xaf\x27\x1c", b"BZh", b"Rar!")  # gzip, zstd, ...


def describe_foreign(file: RandomAccessFile) -> str:
    """What the file is and what helps, to follow a refusal; its size if nothing else is known."""
    head = file.read(0, min(file.size, HEAD_BYTES))
    return f": {_described(head, file) or f'it has {file.size} bytes of another form'}"


def _described(head: bytes, file: RandomAccessFile) -> str:
    start = head.lstrip().lower()
    if not head:
        return "it is empty"
    if head.startswith(b"version https://git-lfs"):
        return "it is a Git LFS pointer, `git lfs pull` fetches the file itself"
    if start.startswith((b"<!doctype", b"<html", b"<?xml")):
        return "it is a web page, not the file that a link on it leads to"
    if head.startswith(_OLD_PYTORCH):
        return "it is in PyTorch's format before 1.6, load it there and save it again"
    if head.startswith(_PACKED):
        return "it is compressed, unpack it first"
    if not any(head):
        return "it begins with zeros, as an unfinished download does"
    if file.path.name.endswith(".index.json"):
        return "it is an index of parts, give the directory"
    text = head.decode("utf-8", "replace")
    return f"it holds the text {text[:MAX_SHOWN]!r}" if text.replace("\n", " ").isprintable() else ""
