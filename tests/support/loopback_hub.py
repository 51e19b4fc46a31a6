"""The part of the Hugging Face hub's HTTP interface that downloads of data sets use, on a loopback address."""

import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def serve(repositories, monkeypatch, cache):
    """A hub with these data sets {ORG/NAME: {file: bytes}}, as the only one that huggingface_hub knows; yields the
    requested paths."""
    asked = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.do_GET(body=False)

        def do_GET(self, body=True):
            asked.append(self.path)
            name = next((name for name in repositories if f"/datasets/{name}/" in f"{self.path}/"), None)
            if name is None:
                return self.reply(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no such repository"})
            files = repositories[name]
            if not self.path.startswith("/api/"):
                content = files[self.path.split("/", 6)[6]]
                etag = hashlib.sha256(content).hexdigest()
                return self.reply(200, content if body else b"", {"ETag": f'"{etag}"'}, len(content), name)
            if "/tree/" in self.path:
                entries = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
                return self.reply(200, json.dumps(entries).encode())
            info = {"id": name, "sha": commit_of(files), "siblings": [{"rfilename": file} for file in files]}
            return self.reply(200, json.dumps(info).encode())

        def reply(self, status, content, headers=(), size=None, name=None):
            self.send_response(status)
            for key, value in dict(headers).items():
                self.send_header(key, value)
            if name:
                self.send_header("X-Repo-Commit", commit_of(repositories[name]))
            self.send_header("Content-Length", str(len(content) if size is None else size))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    url = address + "/{repo_id}/resolve/{revision}/{filename}"
    constants = {"ENDPOINT": address, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False}
    for key, value in (constants | {"HUGGINGFACE_CO_URL_TEMPLATE": url}).items():
        monkeypatch.setattr(f"huggingface_hub.constants.{key}", value)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)
    try:
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def commit_of(files):
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
