"""Entry point of the optional inspection: its routes, and the history that observes a service's requests.

Only `quire.server.app` imports it. Generating and serving do not depend on it: without this package the routes of the
inspection answer 404.
"""

from fastapi import FastAPI

from quire.server.service import Service
from quire.server.watch import debug_routes, explain_routes
from quire.server.watch.history import History


def install_inspection(app: FastAPI, service: Service) -> None:
    """Add the inspection's routes to an application, and let its history observe the service's requests.

    The routes find the history as `request.app.state.history`.
    """
    history = app.state.history = History(service.options.max_history_bytes)
    service.observer = history
    app.include_router(explain_routes.router)
    if service.options.enable_debug:
        app.include_router(debug_routes.router)
