"""The page's files: as the server sends them, and all of them in one file with a model.

`page/` holds HTML, CSS and ES modules, which browsers read as they are. Nothing on the page comes
from elsewhere, and its policy forbids it: no inline script or style, no request to another host,
no text that becomes HTML (Trusted Types).
"""

from __future__ import annotations

import base64
import hashlib
import json
import posixpath
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from urllib.parse import quote

TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
"""The media type of each suffix; files of other suffixes are not served."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # ask every time; the ETag answers
}
IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*\(?\s*)(["'])(\.{1,2}/[^"']+)\2""")
STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)" ?/?>')
SCRIPT = re.compile(r'<script type="module" src="([^"]+)"></script>')
WORKER = "/page/model/worker.js"
LITERAL = " !\"$&'()*+,-./:;<=>?@[\\]^_`{|}~"
"""Characters that stand for themselves in a data: URL within a script of HTML."""
PART = 3 << 18
"""Bytes of weights in one element: handing them to the worker takes the page a few milliseconds."""


@cache
def page_files() -> dict[str, bytes]:
    """Return the page's files by the path that each is served at; "/" is index.html."""
    by_path = dict(_walk(files("tiedgpt.serve") / "page", "/page"))
    return {"/": by_path.pop("/page/index.html")} | by_path


def _walk(folder: Traversable, path: str) -> list[tuple[str, bytes]]:
    pages = []
    for entry in folder.iterdir():
        if entry.is_dir():
            pages += _walk(entry, f"{path}/{entry.name}")
        elif entry.name.rpartition(".")[2] in TYPES:
            pages.append((f"{path}/{entry.name}", entry.read_bytes()))
    return pages


def media_type(path: str) -> str:
    """Return the media type of the file that is served at a path."""
    return TYPES[path.rpartition(".")[2] if path != "/" else "html"]


@cache
def etag(data: bytes) -> str:
    """Return a hash of the data, for `ETag` and `If-None-Match`."""
    return f'"{hashlib.sha256(data).hexdigest()[:32]}"'


def in_one_file(answers: Mapping[str, str], weights: bytes) -> str:
    """Return the page with a model inside, which opens without a server, also from a disk.

    `answers`: the JSON of those that the model cannot compute there, by the key that page/api.js
    asks for; `weights`: what `page_model.pack_model` returns. Browsers load no module from a file
    beside a page on disk. So the modules become data: URLs, which an import map names, and those
    that compute become one script for a worker. The policy names the inline scripts and the style
    by their hashes, and allows no request to anywhere.
    """
    page = {path: _shorten(data.decode(), path) for path, data in page_files().items()}
    html = page["/"]
    (start,) = SCRIPT.findall(html)
    imports = {path[1:]: _data_url(_bare(page[path], path)) for path in _list_modules(f"/{start}")}
    page_map = json.dumps({"imports": imports})
    begin = f'import "{start}";'
    styles = [page[f"/{name}"] for name in STYLE.findall(html)]
    policy = (
        f"default-src 'none'; script-src {_hash(page_map)} {_hash(begin)} data:; "
        f"style-src {' '.join(map(_hash, styles))}; img-src data:; worker-src blob:; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    held = ",".join(f"{json.dumps(request)}:{answer}" for request, answer in answers.items())
    data = ("{" + held + "}").replace("<", "\\u003c")  # no "</script>" ends it
    head = f'<meta http-equiv="content-security-policy" content="{policy}">'
    scripts = [f'<script type="application/json" id="data">{data}</script>']
    scripts += [f'<script type="text/plain" id="worker">{worker_script()}</script>']
    for part in (weights[at : at + PART] for at in range(0, len(weights), PART)):
        text = base64.b64encode(part).decode()
        scripts.append(f'<script type="text/plain" class="weights">{text}</script>')
    scripts += [f'<script type="importmap">{page_map}</script>']
    scripts += [f'<script type="module">{begin}</script>']
    remaining = iter(styles)
    html = STYLE.sub(lambda _: f"<style>{next(remaining)}</style>", html)
    html = SCRIPT.sub(lambda _: "\n".join(scripts), html)
    return re.sub(r'(<meta charset="[^"]+" ?/?>)', lambda found: found[0] + head, html, count=1)


def worker_script() -> str:
    """Return the modules that page/model/worker.js needs as one script.

    Without their imports and the word `export` they are one, as no two of them give a name to
    different things: Firefox and Chromium start a worker from a file on disk by one script.
    """
    texts = (page_files()[path].decode() for path in _list_modules(WORKER))
    bare = (re.sub(r"^(import .*\n|export )", "", text, flags=re.MULTILINE) for text in texts)
    script = "".join(_shorten(text, WORKER) for text in bare)
    return script.replace("</script", "<\\/script")


def _list_modules(start: str) -> list[str]:
    """Return the paths of a module and of all that it imports, each after its own imports."""
    order: list[str] = []

    def add(path: str) -> None:
        if path not in order:
            for found in IMPORT.finditer(page_files()[path].decode()):
                add(posixpath.normpath(f"{posixpath.dirname(path)}/{found[3]}"))
            order.append(path)

    add(start)
    return order


def _shorten(text: str, path: str) -> str:
    """Return a file without comments, indentation, and line ends and blanks that mean nothing.

    A line end takes three bytes in a data: URL. No string of the page has " // " in it.
    """
    if path.endswith(".css"):
        text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        text = re.sub(r"\s+", " ", text)
        return re.sub(r" ?([{};,]) ?|(?<=:) ", r"\1", text)
    text = re.sub(r"[ \t]+// .*", "", text)
    text = re.sub(r"^[ \t]*(?://.*)?\n|^[ \t]+", "", text, flags=re.MULTILINE)
    text = re.sub(r"(?<=})\n(?=(?:async|class|const|export|function|let) )", "", text)
    return re.sub(r"(?<=[;{([>])\n|\n(?=[})\]<])", "", text)


def _bare(module: str, path: str) -> str:
    """Return a module whose imports are by names of the import map, not by relative paths."""
    folder = posixpath.dirname(path)

    def named(found: re.Match[str]) -> str:
        return f'{found[1]}"{posixpath.normpath(f"{folder}/{found[3]}").lstrip("/")}"'

    return IMPORT.sub(named, module)


def _data_url(module: str) -> str:
    """Return a module as a URL: readable, and a tenth longer where base64 would be a third."""
    url = "data:text/javascript;charset=utf-8," + quote(module, safe=LITERAL)
    return re.sub("<(?=/script|!--)", "%3C", url)  # nothing ends the map


def _hash(text: str) -> str:
    """Return the source expression of an inline script or style in a policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
