"""What is said where a Ray cluster cannot be joined."""

from __future__ import annotations

import pytest

from alignment.errors import InputError, UnavailableError
from alignment.rl.ray_executor import connect

ray = pytest.importorskip("ray")
NEXT = (
    "set RAY_AUTH_MODE=token; the token is read from RAY_AUTH_TOKEN, from the file RAY_AUTH_TOKEN_PATH or from "
    "~/.ray/auth_token"
)


def refusing(said):
    """``ray.init`` as it ends: what the connection said stands in the cause alone."""

    def init(**_):
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379") from RuntimeError(
            f"Failed to connect to GCS. Last connection error: Traceback (most recent call last):\n{said}"
        )

    return init


TOKEN = "ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication token is missing or incorrect."


@pytest.mark.parametrize(
    "mode, wanted",
    [
        (None, "expected RAY_AUTH_MODE=token; found RAY_AUTH_MODE is not set"),
        ("disabled", "expected RAY_AUTH_MODE=token; found disabled"),
        ("token", "expected its token; found another one, or none"),
    ],
)
@pytest.mark.parametrize("named", ["argument", "environment"])
def test_a_cluster_with_a_token_says_how_to_show_it(monkeypatch, mode, wanted, named):
    monkeypatch.setattr(ray, "init", refusing(TOKEN))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    address = "10.0.0.1:6379"
    if named == "environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(InputError) as refused:
        connect(address=address if named == "argument" else None)
    assert not isinstance(refused.value, UnavailableError)
    assert str(refused.value) == f"Ray cluster {address}: the cluster asks for a token; {wanted}. Next: {NEXT}"


def test_a_cluster_that_is_not_there_is_unavailable_and_no_matter_of_tokens(monkeypatch):
    monkeypatch.setattr(ray, "init", refusing("ray.exceptions.RpcError: Timed out while waiting for GCS"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(UnavailableError) as refused:
        connect(address="10.0.0.1:6379")
    assert str(refused.value) == (
        "Ray cluster 10.0.0.1:6379: it does not answer (Failed to connect to Ray cluster at 10.0.0.1:6379). "
        "Next: start it, or name another in RAY_ADDRESS"
    )


def test_a_local_cluster_that_fails_is_not_explained_away(monkeypatch):
    monkeypatch.setattr(ray, "init", refusing(TOKEN))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConnectionError, match="^Failed to connect to Ray cluster"):
        connect()
