"""The page's JSON API: GET requests that read run folders, for the page and for coding agents. /docs lists them.

Each request names its run: `?run=NAME`, a name of /api/runs.
"""

import hmac
import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from learner.live.status import read_status
from learner.report.dash.exposition import RunsCollector
from learner.report.dash.ledger_rows import MOST_COUNTED, ORDERS, Filter
from learner.report.dash.runs import RunFolder, Runs, merged_logs
from learner.report.dash.sample_index import search_of
from learner.report.dash.spans import trace_events
from learner.report.page import render_page
from learner.report.plots import Curves, Plot, compared_plots, metric_plots, reward_plot
from learner.report.recorded_lines import values_of_sample
from protocol.http.bearer import App, Receive, Scope, Send

_FOLDER = Path(__file__).parent
_COOKIE = "sluice_dash_{}"  # of an address with its port: a browser sends one to all ports of a machine
_MOST_ROWS = 500
_SECTIONS = {"learning": "Is it learning?", "healthy": "Is it healthy?", "slow": "Why is it slow?", "rest": "Progress"}


def make_dash(runs: Runs) -> FastAPI:
    """Return the application of the page, without its token."""
    app = FastAPI(title="Sluice: runs", description=__doc__, docs_url=None, redoc_url=None)
    page = render_page("dash.html.j2", _FOLDER, ["dash.js"])

    @app.exception_handler(OSError)
    @app.exception_handler(sqlite3.Error)
    def cannot_read(_: Request, error: Exception) -> Response:
        return _json({"detail": str(error)}, 404 if isinstance(error, FileNotFoundError) else 503)

    @app.exception_handler(OverflowError)
    def too_large(_: Request, error: OverflowError) -> Response:
        return _json({"detail": "a number of the request is larger than any record's"}, 422)

    @app.get("/", response_class=HTMLResponse)
    def index() -> HTMLResponse:
        return HTMLResponse(page)

    @app.get("/docs", response_class=PlainTextResponse)
    def questions() -> str:
        """This list of requests. /openapi.json has it for programs."""
        return _describe(app.openapi())

    registry = CollectorRegistry()
    registry.register(RunsCollector(runs))

    @app.get("/metrics")
    def prometheus() -> Response:
        """The runs that are going, for Prometheus."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    _add_run_routes(app, runs)
    _add_sample_routes(app, runs)
    _add_ledger_routes(app, runs)
    return app


def _add_run_routes(app: FastAPI, runs: Runs) -> None:
    find_run = _run_of(runs)

    @app.get("/api/runs")
    def list_runs() -> Response:
        """The runs, newest write first: name, state, step, scores and number of alarms."""
        return _json([asdict(run.summary()) for run in runs.all()])

    @app.get("/api/live")
    def live(run: Annotated[RunFolder, Depends(find_run)]) -> Response:
        """What changes: summary, newest metrics line, alarms, prompts by state, servers, staleness, events.

        status: the coordinator's newest, while the run's command lives; else null.
        """
        lines = run.lines()
        try:
            of_ledger = run.ledger.live()
        except (OSError, sqlite3.Error) as error:
            of_ledger = {"problem": str(error)}
        newest, status = lines[-1] if lines else {}, read_status(run.path)
        parts = {"summary": asdict(run.summary()), "newest": newest, "alarms": run.alarms(), "status": status}
        return _json({**parts, **of_ledger})

    @app.get("/api/metrics")
    def metrics(run: Annotated[RunFolder, Depends(find_run)], after: int = -1) -> Response:
        """Metrics lines of the steps after one."""
        return _json([line for line in run.lines() if line["step"] > after])

    @app.get("/api/plots")
    def plots(run: Annotated[RunFolder, Depends(find_run)]) -> Response:
        """The plots of a run by question, at most 1,000 points each."""
        return _json(_plots_of(run))

    @app.get("/api/compare")
    def compare(run: Annotated[list[str], Query(description="two runs or more")]) -> Response:
        """Plots of several runs over each other, and the settings that differ."""
        chosen = [_get(runs, name) for name in run]
        drawn = compared_plots({each.name: each.lines() for each in chosen})
        tables = {each.name: {row["name"]: row["value"] for row in each.setting_rows()} for each in chosen}
        return _json({"plots": drawn, "settings": _differences(tables)})

    @app.get("/api/settings")
    def settings(run: Annotated[RunFolder, Depends(find_run)]) -> Response:
        """Every setting, and whether it differs from its default."""
        return _json({"settings": run.setting_rows(), "problem": run.settings()[1]})

    @app.get("/api/logs")
    def logs(run: Annotated[RunFolder, Depends(find_run)], text: str = "") -> Response:
        """The newest 500 entries of all logs by time, with a text in them."""
        return _json(merged_logs(run.path / "logs", text))


def _add_ledger_routes(app: FastAPI, runs: Runs) -> None:
    find_run = _run_of(runs)

    @app.get("/api/books")
    def books(run: Annotated[RunFolder, Depends(find_run)]) -> Response:
        """The token books: every generated token once, by what became of it."""
        return _json(run.ledger.books())

    @app.get("/api/timeline")
    def timeline(
        run: Annotated[RunFolder, Depends(find_run)],
        newest: Annotated[int, Query(ge=1, le=100_000, description="trajectories")] = 10_000,
    ) -> Response:
        """The newest trajectories and steps as trace events: a file for Perfetto."""
        _, rows = run.ledger.trajectories(Filter(), "newest", 0, newest)
        ids = run.samples.ids(list({row["group"] for row in rows}))
        return _json(trace_events(rows, run.lines(), {place: run.samples.calls(id) for place, id in ids.items()}))


def _add_sample_routes(app: FastAPI, runs: Runs) -> None:
    find_run = _run_of(runs)

    @app.get("/api/trajectories")
    def trajectories(
        run: Annotated[RunFolder, Depends(find_run)],
        rows: Annotated[Filter, Depends(Filter)],
        search: Annotated[str, Depends(_search_of)],
        order: Literal[*ORDERS] = "newest",  # type: ignore[valid-type]
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=1, le=_MOST_ROWS)] = 50,
    ) -> Response:
        """Trajectories of the ledger, with the id of the recorded sample where there is one.

        total: how many there are; with is_more there are more, which are not counted. indexed: share of the recorded
        samples that words are looked for in.
        """
        indexed = run.samples.progress()
        if search and not run.samples.has_begun():
            return _json({"total": 0, "is_more": False, "indexed": indexed, "rows": []})
        texts = (run.samples.index, search) if search else None
        total, found = run.ledger.trajectories(rows, order, offset, limit, texts)
        ids = run.samples.ids([row["group"] for row in found])
        listed = [{**row, "sample": ids.get((row["group"], row["sample_index"]))} for row in found]
        most = offset + MOST_COUNTED
        return _json({"total": min(total, most), "is_more": total > most, "indexed": indexed, "rows": listed})

    @app.get("/api/group")
    def group(run: Annotated[RunFolder, Depends(find_run)], group: str) -> Response:
        """The ledger's story of a prompt: its state, trajectories, failures, waste; and its recorded samples."""
        return _json({**run.ledger.story(group), "recorded": run.samples.of_group(group)})

    @app.get("/api/sample")
    def sample(run: Annotated[RunFolder, Depends(find_run)], id: int) -> Response:
        """A recorded sample: tokens with their texts, mask, policy versions, logprobs, and the learner's values."""
        try:
            shown = run.samples.sample(id, run.decoder())
            return _json({**shown, "learner": values_of_sample(run.path, shown)})
        except KeyError:
            raise HTTPException(404, f"sample {id} is not recorded in {run.name}") from None


class TokenGate:
    """ASGI middleware: 401 without the token. It comes in a link once (`?token=`), then as a cookie; or as a header."""

    def __init__(self, app: App, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        cookie = _COOKIE.format(re.sub(r"\W", "_", request.headers.get("host", ""), flags=re.ASCII))
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = request.cookies.get(cookie) or (bearer if scheme.lower() == "bearer" else "")
        answer: Response | None = None
        if self._is_right(request.query_params.get("token", "")):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(cookie, self._token, httponly=True, samesite="lax")
        elif not self._is_right(given):
            answer = Response("Open the link that sluice dash printed: it has the token of this page.\n", 401)
        await (self._app if answer is None else answer)(scope, receive, send)

    def _is_right(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


def _run_of(runs: Runs) -> Any:
    def find_run(run: Annotated[str, Query(description="a name of /api/runs")]) -> RunFolder:
        return _get(runs, run)

    return find_run


def _search_of(text: Annotated[str, Query(description="words of a recorded sample")] = "") -> str:
    search = search_of(text)
    if text.strip() and not search:
        expected = "expected a word with a letter or a digit. Leave it empty to list all trajectories."
        raise HTTPException(422, f"text is {text}, {expected}")
    return search


def _get(runs: Runs, name: str) -> RunFolder:
    try:
        return runs.get(name)
    except KeyError:
        raise HTTPException(404, f"no run is named {name}") from None


def _plots_of(run: RunFolder) -> list[dict[str, Any]]:
    lines, (settings, _) = run.lines(), run.settings()
    unused = [each.name for each in settings.rewards.endpoints if each.weight == 0] if settings else []
    first = reward_plot(lines)
    sections: dict[str, Curves] = metric_plots(lines, unused)
    found: list[Plot] = [first] if first else []
    return [
        {
            "title": title,
            "plots": [*(found if name == "learning" else []), *sections[name].plots],
            "constant": sections[name].constant,
        }
        for name, title in _SECTIONS.items()
    ]


def _differences(tables: Mapping[str, Mapping[str, str]]) -> list[dict[str, Any]]:
    names: Sequence[str] = list(dict.fromkeys(name for table in tables.values() for name in table))
    rows = [(name, {run: table.get(name) for run, table in tables.items()}) for name in names]
    return [{"name": name, "values": values} for name, values in rows if len(set(values.values())) > 1]


def _describe(schema: Mapping[str, Any]) -> str:
    """Return the requests of an OpenAPI schema as plain text."""
    parts = [schema["info"]["description"].strip()]
    for path, methods in schema["paths"].items():
        of_path = methods["get"]
        parts.append(f"GET {path}\n    {of_path.get('description', of_path['summary'])}".replace("\n\n", "\n    "))
        for value in of_path.get("parameters", []):
            kind = value["schema"]
            type_ = kind.get("type") or "/".join(each["type"] for each in kind.get("anyOf", []))
            default = " (required)" if value["required"] else f" = {kind.get('default')}"
            parts[-1] += f"\n    {value['name']}: {type_}{default}  {value.get('description', '')}".rstrip()
    return "\n\n".join(parts) + "\n"


def _json(value: object, status: int = 200) -> Response:
    try:
        content = msgspec.json.encode(value)
    except UnicodeEncodeError:  # half a character: of a file's name that is not UTF-8
        content = json.dumps(value).encode()
    return Response(content, status, media_type="application/json")
