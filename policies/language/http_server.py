"""The servers that answer for a policy over HTTP: which kind it is, how it is asked, and how it takes weights.

vLLM takes weights from a folder by its development routes (`VLLM_SERVER_DEV_MODE=1`); whether a head that is tied to
the embeddings follows depends on the device, so there `vllm_worker.FromFolder` has to be loaded.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.policies.language.http_messages import NOT_FINITE, OWNER, read_error

BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers after which it is worth trying again
EXTENSION = "embodied.policies.language.vllm_worker.FromFolder"


class Away(EmbodiedError):
    """The server is not there, or not able to answer now."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status  # of its answer, where there is one


class Server:
    """One server. All but the constructor runs in the loop of its first call."""

    def __init__(self, url: str, token: str | None, answer_s: float) -> None:
        self.url, self.token, self.answer_s = url.rstrip("/").removesuffix("/v1"), token, answer_s
        self.name = f"policy.url={url}"
        self.session: Any = None
        self.model, self.owner = "", ""
        self.max_length: int | None = None
        self.adapters: int | None = None  # their rank

    @property
    def ours(self) -> bool:
        return self.owner == OWNER

    async def look(self) -> None:
        """Find out which model it has, and what kind of server it is."""
        found = await self.call("GET", "/v1/models")
        try:
            about = found["data"][0]
            self.model, self.owner = str(about["id"]), str(about.get("owned_by"))
            self.max_length, self.adapters = about.get("max_model_len"), about.get("lora_rank")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.name}/v1/models does not name a model: is it a server of OpenAI's kind?"
            ) from None

    async def ask(self, body: dict[str, Any]) -> Any:
        """The answer of /v1/completions."""
        return await self.call("POST", "/v1/completions", body)

    async def weights(self) -> str:
        """What it calls its weights; empty where it does not say."""
        if not self.ours and self.owner != "vllm":
            return ""
        found = await self.call("GET", "/weight_info", missing={})
        return str(found.get("weight_version", ""))

    async def load(self, folder: Path, name: str, tied: bool) -> None:
        """Make it load the weights in a folder, and call them so."""
        if self.ours:
            version = int(name.partition("-")[0].removeprefix("v"))
            body = {"path": str(folder), "version": version, "weight_version": name}
            found = await self.call("POST", "/update_weights", body)
            if found.get("weight_version") != name:
                raise EmbodiedError(f"{self.name} has read other weights from {folder} than were written there")
        elif self.owner == "vllm":
            await self.load_into_vllm(folder, name, tied)
        else:
            raise ConfigError(
                f"{self.name} is a server of {self.owner or 'another kind'}, which has no way to take weights that is "
                "known here; python -m embodied.serve and vllm serve have one"
            )

    async def load_into_vllm(self, folder: Path, name: str, tied: bool) -> None:
        """By way of vLLM's development routes, while nothing is being written."""
        method, why = ("load_folder", f"--worker-extension-cls {EXTENSION}") if tied else ("reload_weights", "")
        await self.call("POST", "/pause?mode=wait", missing=None)
        try:
            arguments = {"args": [str(folder)]} if tied else {"kwargs": {"weights_path": str(folder)}}
            try:
                await self.call("POST", "/collective_rpc", {"method": method} | arguments)
            except Away as err:
                if err.status != 500:
                    raise
                raise EmbodiedError(
                    f"{self.name} did not load {folder} ({err}){why and f'; start it with {why}'}"
                ) from None
            if not (await self.call("POST", "/reset_prefix_cache")).get("success", True):
                raise Away("it did not forget its prefixes")
            await self.call("POST", "/update_weight_version", {"new_version": name})
        finally:
            await self.call("POST", "/resume")

    async def call(self, method: str, path: str, body: Any = None, missing: Any = ...) -> Any:
        """The JSON of an answer. Raises Away where trying again may help. `missing`: what a route that is not there
        stands for."""
        import aiohttp

        if self.session is None:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            limits = aiohttp.ClientTimeout(total=self.answer_s, sock_connect=10)
            self.session = aiohttp.ClientSession(
                headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0), trust_env=False
            )
        try:
            async with self.session.request(method, self.url + path, json=body, allow_redirects=False) as response:
                status, text = response.status, await response.text()
        except TimeoutError:
            raise Away(f"{path} took longer than {self.answer_s:g} s (policy.answer_s)") from None
        except aiohttp.ClientConnectorError as err:
            raise Away(f"no connection ({err.os_error.strerror or err.os_error})") from None
        except (aiohttp.ClientError, OSError) as err:
            raise Away(f"{type(err).__name__}: {err}" if str(err) else type(err).__name__) from None
        if status == 404 and missing is not ...:
            return missing
        try:
            found = json.loads(text) if text.strip() else {}
        except ValueError:
            found = text[:200]
        if status < 300:
            return found
        said, code = read_error(found)
        if status == 500 and code == NOT_FINITE:
            return UNUSABLE
        if status in BUSY:
            raise Away(f"{path} answers {status}: {said}", status)
        raise ConfigError(f"{self.name}: {path} answers {status}: {said}{self.hint(status, path)}")

    def hint(self, status: int, path: str) -> str:
        if status in (401, 403):
            return "; policy.token_from says where the token is" + ("" if self.token else ", and there is none")
        if status == 404 and self.owner == "vllm" and path in ("/collective_rpc", "/resume"):
            return "; only with VLLM_SERVER_DEV_MODE=1 in its environment does vllm serve take new weights"
        return ""

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
            await asyncio.sleep(0)


UNUSABLE = {"choices": [{"token_ids": [0], "finish_reason": "stop", "logprobs": {"token_logprobs": [None]}}]}
