"""Downloads a file from a URL: resumes a broken download, and limits its size and how slow the server may be.

torch.hub, pooch and torchvision's download_url are not used: none of them resumes.
"""

import hashlib
import http.client
import io
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    UnknownHandler,
)

from tqdm import tqdm

from dml.errors import UserError
from dml.files import write_atomically

ATTEMPTS = 5
PAUSE = 1.0  # seconds after the first attempt, doubled each time
TIMEOUT = 60.0
BLOCK = 2**18
GRACE = 60.0  # seconds over which the speed is measured
SLOWEST = 1000  # bytes a second that a server has to send at least, on average over that time
SPARE = 10**9  # bytes that are left free on the disk


class _BrokeOff(Exception):
    pass


def fetch(url: str, path: Path, *, md5: str | None = None, at_most: int | None = None) -> None:
    """Downloads `url` to `path`, unless the file is there already.

    An incomplete download is kept in `<path>.part`, with a note beside it of how the server identified the file, so
    that only the same file is continued. A broken connection is tried again, `ATTEMPTS` times in all.

    Args:
        url: begins with http:// or https://.
        path: of the new file.
        md5: of the whole file, if it is known.
        at_most: the most bytes that the file may have, if a limit is known; the free disk space limits it in any case.

    Raises:
        UserError: the server does not answer or is slower than `SLOWEST`, sends a web page in place of a file, a larger
            file than allowed, or one whose MD5 is not `md5`. In the last three cases what was sent is not kept.
    """
    if not path.exists():
        if not url.lower().startswith(("http://", "https://")):
            raise UserError(f"{url} is no address that can be fetched: give one that begins with http:// or https://.")
        part = path.with_name(f"{path.name}.part")
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                _take_on(url, part, at_most)
                break
            except HTTPError as error:
                error.close()  # it holds the connection
                if error.code < 500:
                    raise UserError(f"{url} answers {error.code} {error.reason}.") from None
                reason: Exception = error
            except (OSError, http.client.HTTPException, _BrokeOff) as error:
                reason = error
            except UserError:  # a ValueError too
                raise
            except ValueError as error:
                raise UserError(f"{url} is no address that can be fetched ({error}).") from None
        else:
            kept = f" {part.stat().st_size} bytes are kept, and the next start continues." if part.exists() else ""
            raise UserError(f"{url} cannot be fetched ({reason}).{kept}") from None
        os.replace(part, path)
        _note(part).unlink(missing_ok=True)
    if md5 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != md5:
            path.unlink()
            raise UserError(
                f"{url} gives another file than the expected one (its MD5 is {found}, expected {md5}): it was not kept."
            )


def _note(part: Path) -> Path:
    """Returns the path of the note that says which file of which server the part belongs to."""
    return part.with_name(f"{part.name}.json")


def _said(part: Path) -> dict[str, Any]:
    try:
        said = json.loads(_note(part).read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


class _Paced(io.RawIOBase):
    """A stream of all that a server sends, headers included, that fails if it comes too slowly.

    A timeout alone does not notice slow sending. The wait for the first byte is left to the timeout, since a server may
    need time before it answers.
    """

    def __init__(self, raw: Any) -> None:
        self._raw, self._bytes = raw, 0
        self._since: float | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._raw.readinto(buffer)
        self._bytes += count
        if self._since is None:
            self._since = time.monotonic()
        passed = time.monotonic() - self._since
        if passed > GRACE:
            if count and self._bytes < SLOWEST * passed:
                raise OSError(f"{self._bytes} bytes came in {passed:.0f} seconds")
            self._since, self._bytes = time.monotonic(), 0
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fp = io.BufferedReader(_Paced(self.fp.detach()))


class _Connection(http.client.HTTPConnection):
    response_class = _Response


class _SecureConnection(http.client.HTTPSConnection):
    response_class = _Response


class _Handler(HTTPHandler):
    def http_open(self, request: Request) -> Any:
        return self.do_open(_Connection, request)


class _SecureHandler(HTTPSHandler):
    def https_open(self, request: Request) -> Any:
        return self.do_open(_SecureConnection, request)


def _open(request: Request) -> Any:
    """Opens a request as urllib does, but only for http and https."""
    opener = OpenerDirector()
    kinds = (ProxyHandler, UnknownHandler, _Handler, _SecureHandler, HTTPRedirectHandler)
    for kind in (*kinds, HTTPDefaultErrorHandler, HTTPErrorProcessor):
        opener.add_handler(kind())
    return opener.open(request, timeout=TIMEOUT)


def _take_on(url: str, part: Path, at_most: int | None) -> None:
    """Fetches the missing rest of the file, or all of it if the server cannot continue."""
    have = part.stat().st_size if part.exists() else 0
    note = _said(part) if have else {}
    headers = {"User-Agent": "dml", "Accept-Encoding": "identity"}
    if have and note.get("url") == url and note.get("is"):
        headers |= {"Range": f"bytes={have}-", "If-Range": note["is"]}
    try:
        answer = _open(Request(quote(url, safe="%/:?&=#+,;@~!$'()*[]"), headers=headers))
    except HTTPError as error:
        if error.code != 416:  # 416: the file has no bytes after those we have
            raise
        error.close()
        if have == note.get("size"):
            return
        part.unlink()
        raise _BrokeOff("the server's file is shorter than the part fetched so far") from None
    with answer:
        if "text/html" in answer.headers.get("Content-Type", ""):
            raise UserError(f"{url} gives a web page and no file: the address is dead or wants a login.")
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if answer.status == 206 and not goes_on:
            part.unlink(missing_ok=True)
            raise _BrokeOff("the server sent another part of the file than the one asked for")
        length = int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
        size = None if length is None else length + (have if goes_on else 0)
        if not goes_on:
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            if mark.startswith("W/"):  # a weak ETag does not allow a download to be continued
                mark = ""
            part.unlink(missing_ok=True)  # removed first, or the note would describe another file than this part
            write_atomically(_note(part), json.dumps({"url": url, "is": mark, "size": size}))
        start = have if goes_on else 0
        bound = _Bound(url, part, start, at_most)
        if size is not None and size > bound.limit:
            raise bound.error(f"has {size / 1e9:.2f} GB")
        _copy(answer, part, start, size, bound)


class _Bound:
    """The most bytes that a file may have: `limit`, the smaller of the known limit and the free disk space."""

    def __init__(self, url: str, part: Path, start: int, at_most: int | None) -> None:
        self._url, self._part = url, part
        self._room = max(0, start + shutil.disk_usage(part.parent).free - SPARE)
        self.limit = self._room if at_most is None else min(self._room, at_most)

    def error(self, has: str) -> UserError:
        """Removes what was fetched of a file that is too large, and returns the error to raise."""
        self._part.unlink(missing_ok=True)
        _note(self._part).unlink(missing_ok=True)
        if self.limit < self._room:
            at_most = f"the file should have {self.limit / 1e9:.2f} GB at most: it is a wrong file and was not kept"
        else:
            at_most = f"{self._part.parent} has {self._room / 1e9:.2f} GB to spare: free some disk space"
        return UserError(f"{self._url} {has}, and {at_most}.")


def _copy(answer: Any, part: Path, start: int, size: int | None, bound: _Bound) -> None:
    with (
        part.open("ab" if start else "wb") as file,
        tqdm(total=size, initial=start, desc=part.stem, unit="B", unit_scale=True, delay=1, leave=False) as bar,
    ):
        done = start
        while block := answer.read(BLOCK):
            done += len(block)
            if done > bound.limit:
                raise bound.error(f"sends {done / 1e9:.2f} GB and more")
            file.write(block)
            bar.update(len(block))
    if size is not None and done < size:
        raise _BrokeOff(f"the connection broke off after {done} of {size} bytes")
