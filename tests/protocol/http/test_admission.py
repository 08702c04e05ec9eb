"""A full service refuses requests of its path before their bodies are read."""

from typing import Any

from protocol.http.admission import Admission, AdmissionMiddleware


async def _post(middleware: AdmissionMiddleware, path: str) -> int:
    statuses: list[int] = []

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    await middleware({"type": "http", "path": path, "method": "POST", "headers": []}, _no_body, send)
    return statuses[0]


async def _no_body() -> Any:
    raise AssertionError("the body was read")


async def _application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


async def test_full_service_answers_503_to_its_path_before_the_body_is_read() -> None:
    admission, refused = Admission(2), []
    middleware = AdmissionMiddleware(
        _application, "/retrieve", admission, "come back later", 7, lambda: refused.append(1)
    )
    with admission.running():
        assert await _post(middleware, "/retrieve") == 200
        with admission.running():
            assert await _post(middleware, "/retrieve") == 503
            assert await _post(middleware, "/health") == 200
    assert (await _post(middleware, "/retrieve"), len(refused)) == (200, 1)
