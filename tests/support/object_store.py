"""An object store on this machine, of which a test says how it fails: GET with Range."""

import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

LISTING = '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{}</ListBucketResult>'
ENTRY = (
    "<Contents><Key>{}</Key><Size>1</Size><ETag>x</ETag><LastModified>2026-11-27T00:00:00Z</LastModified></Contents>"
)


@dataclass
class Store:
    """Objects by their path, such as /bucket/x.h5. Each fault strikes that many of the next GETs."""

    objects: dict[str, bytes] = field(default_factory=dict)
    tag: str = '"1"'
    date: str = "Fri, 27 Nov 2026 00:00:00 GMT"
    query: str = ""  # GET is refused without it, as for a signed URL
    status: int = 503
    message: str = ""
    refused: int = 0  # answered by `status` and `message`
    cut: int = 0  # the connection ends in mid-body
    hanging: int = 0  # no answer comes for hang_s
    hang_s: float = 3.0
    flipped: int = 0  # a bit is another one
    flipped_ends: int = 0  # the first and the last one are
    replaced: int = 0  # all are those of a page
    ignores_ranges: bool = False
    gets: list[tuple[str, str]] = field(default_factory=list)
    """(path, range) of each GET that was answered in full."""
    delay_s: float = 0.0
    n_at_work: int = 0
    max_at_work: int = 0
    """Most GETs that were answered at the same time."""

    def strikes(self, fault: str) -> bool:
        n_left = getattr(self, fault)
        setattr(self, fault, max(0, n_left - 1))
        return n_left > 0


def serve(store: Store) -> tuple[ThreadingHTTPServer, str]:
    """The server, which runs until `shutdown`, and its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            if "Content_Length" not in headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def versions(self) -> dict[str, str]:
            return {name: text for name, text in (("ETag", store.tag), ("Last_Modified", store.date)) if text}

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if "list-type=2" in query:
                prefix = f"{path}/"
                keys = sorted(key.removeprefix(prefix) for key in store.objects if key.startswith(prefix))
                return self.answer(200, LISTING.format("".join(map(ENTRY.format, keys))).encode())
            store.n_at_work += 1
            store.max_at_work = max(store.max_at_work, store.n_at_work)
            try:
                self.answer_range(unquote(path), query)
            finally:
                store.n_at_work -= 1

        def answer_range(self, path: str, query: str) -> None:
            if store.strikes("hanging"):
                time.sleep(store.hang_s)
            if store.strikes("refused"):
                return self.answer(store.status, store.message.encode(), Content_Type="application/xml")
            if store.query not in ("", query):
                return self.answer(403)
            if path not in store.objects:
                return self.answer(404)
            time.sleep(store.delay_s)
            whole = store.objects[path]
            begin, _, last = (
                (self.headers["Range"] or f"bytes=0-{len(whole) - 1}").removeprefix("bytes=").partition("-")
            )
            last = min(int(last), len(whole) - 1)
            body = whole if store.ignores_ranges else whole[int(begin) : last + 1]
            if len(body) == 1:  # it is asked for the size
                return self.answer(206, body, Content_Range=f"bytes 0-0/{len(whole)}", **self.versions())
            if store.strikes("flipped"):
                middle = len(body) // 2
                body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
            if store.strikes("flipped_ends"):
                body = bytes([body[0] ^ 1]) + body[1:-1] + bytes([body[-1] ^ 1])
            if store.strikes("replaced"):
                body = (b"<html>" * len(body))[: len(body)]
            headers = self.versions()
            if not store.ignores_ranges:
                headers["Content_Range"] = f"bytes {begin}-{last}/{len(whole)}"
            if store.strikes("cut"):
                self.answer(206, body[: len(body) // 2], Content_Length=str(len(body)), **headers)
                self.close_connection = True
                return None
            store.gets.append((path, f"{begin}-{last}"))
            return self.answer(200 if store.ignores_ranges else 206, body, **headers)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, f"http://127.0.0.1:{server.server_port}"
