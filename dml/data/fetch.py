"""A file from a URL, resumed where it broke off.

torch.hub, pooch and torchvision's download_url were passed over: none of them resumes.
"""

import hashlib
import http.client
import json
import os
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from tqdm import tqdm

from dml.errors import UserError
from dml.files import replace_file

ATTEMPTS = 5
PAUSE = 1.0  # seconds after the first attempt, doubled each time
TIMEOUT = 60.0
BLOCK = 2**18


class _BrokeOff(Exception):
    pass


def fetch(url: str, path: Path, *, md5: str | None = None) -> None:
    """Downloads `url` to `path`, unless it is there.

    What has come so far is `<path>.part`, beside it what the server said of the file, so that the rest is only taken of
    the same file. A connection that breaks off is taken up again a few times.

    Args:
        md5: of the whole file, where it is known.

    Raises:
        UserError: no answer, a web page instead of a file, or another file than `md5` says; the latter two are not
            kept.
    """
    if not path.exists():
        part = path.with_name(f"{path.name}.part")
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
            try:
                _take_on(url, part)
                break
            except HTTPError as error:
                error.close()  # it holds the connection
                if error.code < 500:
                    raise UserError(f"{url} answers {error.code} {error.reason}.") from None
                reason: Exception = error
            except (OSError, http.client.HTTPException, _BrokeOff) as error:
                reason = error
            except ValueError as error:
                raise UserError(f"{url} is no address that can be fetched ({error}).") from None
        else:
            kept = f" {part.stat().st_size} bytes are kept, and the next start goes on." if part.exists() else ""
            raise UserError(f"{url} cannot be fetched ({reason}).{kept}") from None
        os.replace(part, path)
        _note(part).unlink(missing_ok=True)
    if md5 is not None:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != md5:
            path.unlink()
            raise UserError(f"{url} gives another file than the known one (MD5 {found}, known {md5}): it was not kept.")


def _note(part: Path) -> Path:
    """What the server said of the file of which this is a part."""
    return part.with_name(f"{part.name}.json")


def _said(part: Path) -> dict[str, Any]:
    try:
        said = json.loads(_note(part).read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _take_on(url: str, part: Path) -> None:
    """Fetches what is lacking of the file, or all of it where the server cannot go on."""
    have = part.stat().st_size if part.exists() else 0
    note = _said(part) if have else {}
    headers = {"User-Agent": "dml", "Accept-Encoding": "identity"}
    if have and note.get("url") == url and note.get("is"):
        headers |= {"Range": f"bytes={have}-", "If-Range": note["is"]}
    try:
        answer = urlopen(Request(quote(url, safe="%/:?&=#+,;@~!$'()*[]"), headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != 416:  # there is nothing after what we have
            raise
        error.close()
        if have == note.get("size"):
            return
        part.unlink()
        raise _BrokeOff("the server has less than was fetched") from None
    with answer:
        if "text/html" in answer.headers.get("Content-Type", ""):
            raise UserError(f"{url} gives a web page and no file: it wants a login, or is dead.")
        goes_on = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if answer.status == 206 and not goes_on:
            part.unlink(missing_ok=True)
            raise _BrokeOff("the server gave another part than was asked for")
        length = int(answer.headers["Content-Length"]) if "Content-Length" in answer.headers else None
        size = None if length is None else length + (have if goes_on else 0)
        if not goes_on:
            mark = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
            if mark.startswith("W/"):  # of a weak one servers must not go on
                mark = ""
            part.unlink(missing_ok=True)  # before what is said of another file
            replace_file(_note(part), json.dumps({"url": url, "is": mark, "size": size}))
        _copy(answer, part, have if goes_on else 0, size)


def _copy(answer: Any, part: Path, start: int, size: int | None) -> None:
    with (
        part.open("ab" if start else "wb") as file,
        tqdm(total=size, initial=start, desc=part.stem, unit="B", unit_scale=True, delay=1, leave=False) as bar,
    ):
        done = start
        while block := answer.read(BLOCK):
            file.write(block)
            done += len(block)
            bar.update(len(block))
    if size is not None and done < size:
        raise _BrokeOff(f"the connection broke off after {done} of {size} bytes")
