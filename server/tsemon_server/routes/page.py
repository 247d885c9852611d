"""The page and its files, and the documentation."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles

from tsemon_server.access.needs import needs
from tsemon_server.routes.parameters import refuse_unknown_parameters
from tsemon_server.routes.signature import TheParts
from tsemon_server.ui import ASSETS, DOCS_HEADERS, ETAGS, SAFETY_HEADERS

router = APIRouter(include_in_schema=False, dependencies=[Depends(refuse_unknown_parameters)])


@router.api_route("/", methods=["GET", "HEAD"])
@needs()
async def index(request: Request) -> Response:
    return _serve(request, "index.html")


@router.get("/docs")
@needs()
async def docs(request: Request) -> Response:
    return _serve(request, "docs.html", DOCS_HEADERS)


@router.api_route("/ui/{name:path}", methods=["GET", "HEAD"])
@needs()
async def asset(request: Request, name: str) -> Response:
    return _serve(request, name)


@router.api_route("/help", methods=["GET", "HEAD"])
@needs()
async def help_start() -> Response:
    return RedirectResponse("help/")  # relative, as a proxy may serve all below a prefix


@router.api_route("/help/{name:path}", methods=["GET", "HEAD"])
@needs()
async def help_file(request: Request, parts: TheParts, name: str) -> Response:
    folder = parts.help_folder
    if not folder.is_dir():
        raise HTTPException(404, "the documentation is not built; run `make site`, or install a wheel that has it")
    response = await StaticFiles(directory=folder).get_response(name or "index.html", request.scope)
    response.headers.update({**DOCS_HEADERS, "Cache-Control": "no-cache"})
    return response


def _serve(request: Request, name: str, safety: Mapping[str, str] = SAFETY_HEADERS) -> Response:
    found = ASSETS.get(name)
    if found is None:
        raise HTTPException(404, "the page has no such file")
    headers = {**safety, "ETag": ETAGS[name], "Cache-Control": found.cache_control}
    if ETAGS[name] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)
