"""Routes /start_profile and /stop_profile (--profile-dir): what the engines do, as files that the operator reads.

A profile is a JSON file of an engine, as it reports it, and one for https://speedscope.app: a profile of each thread by
its stacks, and one of the ops of the layers. Files have functions, names of ops and seconds alone.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from quire.engine.messages import Profile
from quire.server.api.http_responses import json_response
from quire.server.errors import ApiError
from quire.server.http.application import check_operator
from quire.server.service import Service

FILE_MODE, FOLDER_MODE = 0o600, 0o700
MOST_OPS = 20           # the longest ones, in the answer
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"

router = APIRouter(tags=["debug"])


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Start a profile of every engine."""
    service = _service(request)
    started = await asyncio.gather(*(engine.start_profile() for engine in service.client.engines))
    if not any(started):
        raise ApiError(409, "a profile is taken already; /stop_profile ends it", code="profile_running")
    return json_response({"status": "started", "engines": len(started)})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the profile of every engine, and write its files."""
    service = _service(request)
    profiles = await asyncio.gather(*(engine.stop_profile() for engine in service.client.engines))
    if not any(profiles):
        raise ApiError(409, "no profile is taken; /start_profile starts one", code="no_profile")
    folder = service.options.profile_dir
    assert folder is not None, "the routes are served with it"
    engines = [
        {"engine": number, **(await asyncio.to_thread(_written, Path(folder), number, profile))}
        for number, profile in enumerate(profiles)
        if profile is not None
    ]
    return json_response({"status": "stopped", "engines": engines})


def _service(request: Request) -> Service:
    """Return the service. ApiError 403 for a client without the operator's key, where there is one."""
    check_operator(request, "profiles are taken")
    service: Service = request.app.state.service
    return service


def _written(folder: Path, number: int, profile: Profile) -> dict[str, Any]:
    """Write the files of an engine's profile; return what the answer tells of it. ApiError 500 if that fails."""
    name = f"profile-{datetime.now(UTC):%Y%m%d-%H%M%S}-{time.monotonic_ns() % 10**6:06}-engine{number}"
    by_op = sorted(profile.ops, key=lambda op: -op[2])
    whole = {
        "engine": number, "seconds": profile.seconds,
        "ops": [{"name": op, "kind": kind, "seconds": seconds} for op, kind, seconds in profile.ops],
        "frames": profile.frames, "stacks": profile.stacks, "threads": profile.threads,
    }  # fmt: skip
    files = {f"{name}.json": whole, f"{name}.speedscope.json": speedscope(name, profile)}
    try:
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        for file, content in files.items():
            with open(os.open(folder / file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as opened:
                opened.write(msgspec.json.encode(content))
    except OSError as error:
        raise ApiError(500, f"the profile cannot be written: {error.strerror}", code="profile_failed") from error
    return {
        "seconds": profile.seconds,
        "files": [str(folder / file) for file in files],
        "kinds": _by_kind(profile.ops),
        "ops": [{"name": op, "kind": kind, "seconds": seconds} for op, kind, seconds in by_op[:MOST_OPS]],
    }


def _by_kind(ops: Sequence[tuple[str, str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for _, kind, seconds in ops:
        found[kind] = found.get(kind, 0.0) + seconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def speedscope(name: str, profile: Profile) -> dict[str, Any]:
    """Return a profile in the file format of speedscope: threads, then the ops of the layers below their kinds."""
    frames: list[dict[str, Any]] = [
        {"name": function, "file": file, "line": line} for function, file, line in profile.frames
    ]
    profiles = [
        _sampled(thread, [profile.stacks[stack] for stack, _ in samples], [seconds for _, seconds in samples])
        for thread, samples in profile.threads.items()
    ]
    if profile.ops:
        kinds = {kind: len(frames) + number for number, kind in enumerate(dict.fromkeys(op[1] for op in profile.ops))}
        frames += [{"name": kind} for kind in kinds]
        stacks = [[kinds[kind], len(frames) + number] for number, (_, kind, _) in enumerate(profile.ops)]
        frames += [{"name": op} for op, _, _ in profile.ops]
        profiles.append(_sampled("ops of the layers", stacks, [seconds for _, _, seconds in profile.ops]))
    return {
        "$schema": _SCHEMA, "exporter": "quire", "name": name, "shared": {"frames": frames}, "profiles": profiles,
    }  # fmt: skip


def _sampled(name: str, samples: Sequence[Sequence[int]], weights: Sequence[float]) -> dict[str, Any]:
    return {
        "type": "sampled", "name": name, "unit": "seconds", "startValue": 0, "endValue": sum(weights),
        "samples": samples, "weights": weights,
    }  # fmt: skip
