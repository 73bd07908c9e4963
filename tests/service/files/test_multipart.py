"""Forms as clients send files: every byte of a file comes through, and what is no form is refused."""

from __future__ import annotations

import httpx
import pytest
from starlette.exceptions import HTTPException

from nsm_core.errors import InvalidRequest
from service.files.multipart import read_form


@pytest.mark.parametrize(
    "raw", [b"", b"\r\n", bytes(range(256)) * 9, b"--b\r\n\r\n--", b"a\r\n--boundary-of-no-form\r\n", "é\n".encode()]
)
def test_a_form_of_a_client_is_read_byte_by_byte(raw: bytes) -> None:
    sent = httpx.Request("POST", "http://x", data={"purpose": "bätch"}, files={"file": ('a "b".jsonl', raw)})
    form = read_form(sent.headers["content-type"], sent.read())
    assert (form["file"].raw, form["purpose"].text, form["purpose"].filename) == (raw, "bätch", None)
    assert form["file"].filename is not None


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        b"--b\r\n\r\nx",
        b"--b\r\ncontent-disposition: form-data\r\n\r\nx\r\n--b--\r\n",
        b"x\r\n--b\r\n--b--",
    ],
)
def test_a_body_that_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_form("multipart/form-data; boundary=b", body)


def test_another_content_type_is_415() -> None:
    with pytest.raises(HTTPException) as refused:
        read_form("application/json", b"{}")
    assert refused.value.status_code == 415
    with pytest.raises(InvalidRequest, match="boundary"):
        read_form("multipart/form-data", b"x")


def test_a_name_that_comes_twice_is_refused_by_name() -> None:
    part = b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n1\r\n'
    with pytest.raises(InvalidRequest, match="once") as refused:
        read_form("multipart/form-data; boundary=b", part * 2 + b"--b--\r\n")
    assert refused.value.param == "x"
