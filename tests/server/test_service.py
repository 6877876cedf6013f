"""Who gets a place in the queue."""

import pytest

from quire.server.errors import ApiError
from quire.server.service import Service
from support.http_app import make_app


@pytest.fixture
def service() -> Service:
    """Return a service whose queue has four places."""
    service: Service = make_app(max_queued_requests=4).state.service
    return service


def refusal(service: Service, num_requests: int) -> ApiError:
    with pytest.raises(ApiError) as refused, service.let_in(num_requests):
        pass
    return refused.value


def test_places_are_held_while_requests_are_prepared(service: Service) -> None:
    with service.let_in(3):
        assert refusal(service, 2).code == "server_overloaded"
        with service.let_in(1):
            assert service.num_preparing == 4
    assert service.num_preparing == 0


def test_places_are_given_back_by_a_call_that_fails(service: Service) -> None:
    with pytest.raises(RuntimeError), service.let_in(4):
        raise RuntimeError
    assert service.num_preparing == 0


def test_requests_that_wait_in_the_engine_count(service: Service) -> None:
    service.client.num_queued = 4  # type: ignore[misc]
    error = refusal(service, 1)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "server_overloaded")
    assert int(error.headers["Retry-After"]) >= 1
    assert "at most 4" in error.message


def test_free_seats_are_places_too(service: Service) -> None:
    service.client.num_queued, service.client.num_free_seats = 3, 2  # type: ignore[misc]
    with service.let_in(3):
        assert refusal(service, 1).code == "server_overloaded"
    service.client.num_free_seats = 1  # type: ignore[misc]
    assert refusal(service, 3).code == "server_overloaded"


def test_more_than_ever_fit_are_no_overload(service: Service) -> None:
    error = refusal(service, 5)
    assert (error.status, error.param) == (400, "prompt")


def test_nobody_is_let_in_while_the_server_drains(service: Service) -> None:
    service.is_draining = True
    assert refusal(service, 1).code == "shutting_down"


def test_model_has_its_names_and_no_other(service: Service) -> None:
    assert service.check_model(None) == service.check_model("tiny") == "tiny"
    with pytest.raises(ApiError, match="'huge' does not exist") as refused:
        service.check_model("huge")
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")
