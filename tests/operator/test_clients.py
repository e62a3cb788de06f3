"""The two clients: the API server's refusals as types, the engines' answers as reports, and drift."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from pilotfish_engine.contract.speculation import Envelope
from pilotfish_operator import kube
from pilotfish_operator.apply import projection
from pilotfish_operator.config import ClusterAccess, cluster_access, resolve
from pilotfish_operator.kinds import PODS
from pilotfish_operator.scrape.client import EngineError, Engines, TokenRefused
from tests.operator.engines import FakeEngine, report


@contextlib.asynccontextmanager
async def answering(status: int, text: str) -> AsyncIterator[int]:
    """The port of a server that says the same to everybody."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=text)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        assert server.port
        yield server.port


async def to(server: str, folder: Path) -> kube.Kube:
    """A client with a token and no certificates."""
    (folder / "token").write_text("t")
    settings = await kube.configuration(ClusterAccess(server, str(folder), None))
    settings.ssl_ca_cert = None
    return kube.Kube(settings)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, kube.Unauthorized), (403, kube.Forbidden), (404, kube.NotFound), (409, kube.Conflict), (410, kube.Gone),
     (422, kube.Invalid), (429, kube.TooMany), (500, kube.Unavailable), (503, kube.Unavailable)],
)  # fmt: skip
def test_each_refusal_has_its_type(status: int, kind: type[kube.KubeError]) -> None:
    found = kube.error(status, '{"kind": "Status", "message": "the reason"}', {"Retry-After": "7"})
    assert type(found) is kind
    assert (found.message, found.retry_after) == ("the reason", 7.0)
    assert kube.error(status, "<html>").message == "<html>"


async def test_no_connection_is_unavailable(tmp_path: Path) -> None:
    api = await to("http://127.0.0.1:1", tmp_path)
    with pytest.raises(kube.Unavailable, match="GET /api/v1/namespaces/ns/pods/a: "):
        await api.get(PODS, "ns", "a")
    await api.close()


async def test_a_token_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    (tmp_path / "ca.crt").write_text("")
    access = ClusterAccess("https://127.0.0.1:1", str(tmp_path), None)
    settings = await kube.configuration(access)
    assert await settings.get_api_key_with_prefix("BearerToken") == "Bearer first"
    token.unlink()
    token.write_text("second\n")
    assert await settings.get_api_key_with_prefix("BearerToken") == "Bearer second"
    assert (await kube.credentials(access)).token == "second"


async def test_neither_a_pod_nor_a_kubeconfig_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(kube.KubeError, match="no way to the cluster"):
        await kube.configuration(ClusterAccess(None, str(tmp_path), str(tmp_path / "absent")))


def test_the_account_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("here")
    variables = {"KUBERNETES_SERVICEACCOUNT_DIR": str(tmp_path), "KUBERNETES_SERVICE_HOST": "127.1.2.3",
                 "KUBERNETES_SERVICE_PORT": "6443"}  # fmt: skip
    assert cluster_access(variables) == ClusterAccess("https://127.1.2.3:6443", str(tmp_path), None)
    assert resolve([], variables).election.namespace == "here"
    assert cluster_access({"KUBECONFIG": "k"}).server is None


async def test_a_report_and_a_put_over_real_http() -> None:
    engine = FakeEngine("127.77.0.1", "secret")
    try:
        async with Engines() as engines:
            assert (await engines.report("127.77.0.1", 8000)).method == "NGRAM"
            await engines.put("127.77.0.1", 8000, "secret", Envelope(num_steps=2))
            assert engine.envelope.num_steps == 2
            with pytest.raises(TokenRefused, match="401"):
                await engines.put("127.77.0.1", 8000, "wrong", Envelope(num_steps=1))
            engine.cut()
            with pytest.raises(EngineError, match=r"127\.77\.0\.1:8000 cannot be reached"):
                await engines.report("127.77.0.1", 8000)
    finally:
        engine.cut()


@pytest.mark.parametrize(
    ("status", "body", "sentence"),
    [
        (200, "not json", "sent no report"),
        (200, '{"method": 3}', r"sent no report: \w+: Field required"),
        (503, "loading", "answered 503"),
    ],
)
async def test_anything_but_a_report_is_an_error(status: int, body: str, sentence: str) -> None:
    async with answering(status, body) as port, Engines() as engines:
        with pytest.raises(EngineError, match=sentence):
            await engines.report("127.0.0.1", port)


async def test_a_newer_engine_may_say_more() -> None:
    text = report().model_dump_json()[:-1] + ', "novelty": 1}'
    async with answering(200, text) as port, Engines() as engines:
        assert await engines.report("127.0.0.1", port) == report()


@pytest.mark.parametrize("text", ["<html>somebody between</html>", "[]", ""])
async def test_an_answer_that_is_no_object_is_not_the_api_servers(text: str, tmp_path: Path) -> None:
    async with answering(200, text) as port:
        api = await to(f"http://127.0.0.1:{port}", tmp_path)
        with pytest.raises(kube.Unavailable, match="no JSON object"):
            await api.get(PODS, "ns", "a")
        await api.close()


def test_only_the_fields_of_a_manifest_count_of_a_live_object() -> None:
    live = {"spec": {"replicas": 2, "defaulted": 1, "list": [{"name": "b", "x": 1, "y": 2}, {"name": "a", "x": 3}]}}
    assert projection(live, {"spec": {"replicas": 1, "list": [{"name": "a", "x": 0}]}}) == {
        "spec": {"replicas": 2, "list": [{"x": 3, "name": "a"}]}
    }
    assert projection(live, {"spec": {"list": []}}) == {"spec": {"list": []}}  # others' items are not ours to remove
    assert projection({}, {"spec": {"replicas": 1}}) == {"spec": None}
