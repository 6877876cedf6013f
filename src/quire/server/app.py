"""The application: every route, in the layers that all of them share."""

from fastapi import FastAPI

from quire.core.version import __version__
from quire.server import debug_routes, explain_routes, prefix_routes, system_routes
from quire.server.error_responses import handle_errors
from quire.server.gate import Gate
from quire.server.openai import routes
from quire.server.openapi import ERRORS, describe
from quire.server.request_log import RequestLog
from quire.server.service import Service


def create_app(service: Service) -> FastAPI:
    """Return the application over a service, which the routes find as `request.app.state.service`."""
    app = FastAPI(
        title="Quire",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    app.state.service = service
    app.include_router(system_routes.router)
    app.include_router(routes.router)
    app.include_router(prefix_routes.router)
    app.include_router(explain_routes.router)
    if service.options.enable_debug:
        app.include_router(debug_routes.router)
    handle_errors(app)
    describe(app, service)
    app.add_middleware(Gate, service=service)
    app.add_middleware(RequestLog)  # added last: outermost
    return app
