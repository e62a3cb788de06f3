"""What the tests run as a pod: a small HTTP server that shows what it was given and can be made to misbehave."""

from __future__ import annotations

import http.server
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from urllib.parse import parse_qs, urlparse

READY = threading.Event()
READY.set()


def whoami() -> str:
    """The user that the API server sees, by the standard in-cluster way."""
    folder = Path(os.environ["KUBERNETES_SERVICEACCOUNT_DIR"])
    url = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
    request = urllib.request.Request(
        f"{url}/apis/authentication.k8s.io/v1/selfsubjectreviews",
        data=b'{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}',
        headers={"Authorization": f"Bearer {(folder / 'token').read_text()}", "Content-Type": "application/json"},
    )
    context = ssl.create_default_context(cafile=folder / "ca.crt")
    with urllib.request.urlopen(request, context=context, timeout=5) as answer:
        return str(json.load(answer)["status"]["userInfo"]["username"])


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if url.path == "/ready":
            self.answer("yes" if READY.is_set() else "no", 200 if READY.is_set() else 503)
        elif url.path == "/unready":
            READY.clear()
            self.answer("ok")
        elif url.path == "/env":
            self.answer(json.dumps(dict(os.environ)))
        elif url.path == "/argv":
            self.answer(json.dumps(sys.argv[1:]))
        elif url.path == "/file":
            self.answer(Path(query["path"]).read_text())
        elif url.path == "/whoami":
            self.answer(whoami())
        elif url.path == "/pid":
            self.answer(str(os.getpid()))
        elif url.path == "/spawn":  # a grandchild in a session of its own, with an empty environment
            child = subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={})
            self.answer(str(child.pid))
        elif url.path == "/exit":
            print(query.get("words", ""), flush=True)
            os._exit(int(query["code"]))

    def answer(self, text: str, status: int = 200) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


def terminate(number: int, frame: object) -> None:
    print("SIGTERM", flush=True)
    if os.environ.get("ON_TERM") != "ignore":
        time.sleep(0.3)
        print("drained", flush=True)
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminate)
    print("serving", flush=True)
    http.server.ThreadingHTTPServer((sys.argv[1], 8080), Handler).serve_forever()
