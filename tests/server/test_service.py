"""Admission to the queue: places, prompt tokens, and the share of each client."""

import asyncio

import pytest

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import PreparedRequest, TokenizedPrompt
from quire.server.errors import ApiError
from quire.server.service import Service
from support.http_app import make_app


@pytest.fixture
def service() -> Service:
    """Return a service whose queue has four places."""
    service: Service = make_app(max_queued_requests=4).state.service
    return service


def refusal(service: Service, num_requests: int) -> ApiError:
    with pytest.raises(ApiError) as refused, service.admit(num_requests):
        pass
    return refused.value


def test_places_are_held_while_requests_are_prepared(service: Service) -> None:
    with service.admit(3):
        assert refusal(service, 2).code == "server_overloaded"
        with service.admit(1):
            assert service.admission.num_preparing == 4
    assert service.admission.num_preparing == 0


def test_places_are_given_back_by_a_call_that_fails(service: Service) -> None:
    with pytest.raises(RuntimeError), service.admit(4):
        raise RuntimeError
    assert service.admission.num_preparing == 0


def test_requests_that_wait_in_the_engine_count(service: Service) -> None:
    service.client.num_queued = 4  # type: ignore[misc]
    error = refusal(service, 1)
    assert (error.status, error.type, error.code) == (429, "rate_limit_error", "server_overloaded")
    assert int(error.headers["Retry-After"]) >= 1
    assert "at most 4" in error.message


def test_free_seats_are_places_too(service: Service) -> None:
    service.client.num_queued, service.client.num_free_seqs = 3, 2  # type: ignore[misc]
    with service.admit(3):
        assert refusal(service, 1).code == "server_overloaded"
    service.client.num_free_seqs = 1  # type: ignore[misc]
    assert refusal(service, 3).code == "server_overloaded"


def test_as_many_as_ever_fit_are_let_in_and_more_are_no_overload(service: Service) -> None:
    assert refusal(service, 6).code == "server_overloaded"  # two seats are taken
    service.client.num_free_seqs = 2  # type: ignore[misc]
    with service.admit(6):
        assert service.admission.num_preparing == 6
    error = refusal(service, 7)
    assert (error.status, error.param) == (400, "prompt")
    assert "at most 4 may wait" in error.message
    assert "2 run" in error.message


def test_nobody_is_let_in_while_the_server_drains(service: Service) -> None:
    service.is_draining = True
    assert refusal(service, 1).code == "shutting_down"


def test_clients_take_turns_at_the_threads(service: Service) -> None:
    """One client's many long prompts hold up another's long prompt by one of theirs, not by all."""
    order: list[str] = []

    async def tokenize(client_id: str) -> None:
        await service.threads.run(1 << 20, lambda: order.append(client_id), client_id)

    async def check() -> None:
        await asyncio.gather(*map(tokenize, ["many"] * 10 + ["few"]))

    asyncio.run(check())
    assert order.index("few") <= 2
    assert len(order) == 11


def test_model_has_its_names_and_no_other(service: Service) -> None:
    assert service.check_model(None) == service.check_model("tiny") == "tiny"
    with pytest.raises(ApiError, match="'huge' does not exist") as refused:
        service.check_model("huge")
    assert (refused.value.status, refused.value.param, refused.value.code) == (404, "model", "model_not_found")


def prepared(num_tokens: int, n: int = 1) -> PreparedRequest:
    prompt = pack_tokens([1] * num_tokens)
    return PreparedRequest(Request(0, prompt, SamplingParams(n=n), 0, 1), TokenizedPrompt(None, prompt))


def token_refusal(service: Service, *requests: PreparedRequest) -> ApiError:
    with pytest.raises(ApiError) as refused:
        service.admission.reserve_tokens(service.client, service.options, requests)
    return refused.value


def test_queued_tokens_are_bounded_in_sum() -> None:
    """All calls that are being sent and all requests that wait count, each prompt counted n times."""
    service: Service = make_app(max_queued_tokens=100).state.service
    service.client.num_queued_tokens = 30  # type: ignore[misc]
    with service.admission.reserve_tokens(service.client, service.options, [prepared(10, n=4), prepared(20)]):
        with service.admission.reserve_tokens(service.client, service.options, [prepared(10)]):
            error = token_refusal(service, prepared(1))
        assert (error.status, error.type, error.code) == (429, "rate_limit_error", "server_overloaded")
        assert int(error.headers["Retry-After"]) >= 1
        assert "100 prompt tokens x n wait already, and at most 100 may (max_queued_tokens)" in error.message
        assert token_refusal(service, prepared(6), prepared(1, n=5)).status == 429
    assert service.admission.num_preparing_tokens == 0


def test_request_that_has_been_sent_is_counted_once() -> None:
    service: Service = make_app(max_queued_tokens=100).state.service
    requests = [prepared(10, n=4), prepared(60)]
    with service.admission.reserve_tokens(service.client, service.options, requests) as reserved:
        service.client.num_queued_tokens = 40  # type: ignore[misc]
        reserved.sent()
        assert service.admission.num_preparing_tokens == 60
        assert "100 prompt tokens x n wait already" in token_refusal(service, prepared(1)).message
    assert service.admission.num_preparing_tokens == 0


def test_call_with_more_tokens_than_may_ever_wait_is_refused_for_good() -> None:
    service: Service = make_app(max_queued_tokens=100).state.service
    with service.admission.reserve_tokens(service.client, service.options, [prepared(25, n=4)]):
        pass
    error = token_refusal(service, prepared(25, n=4), prepared(1))
    assert (error.status, error.param) == (400, "n")
    assert "101" in error.message
    assert "100 may wait (max_queued_tokens)" in error.message


# --- requests of a client ---------------------------------------------------------------------------------------------


def test_hold_is_released_with_the_call_unless_it_is_kept(service: Service) -> None:
    with service.admit(2, client_id="key:1") as first:
        assert service.admission.num_by_client["key:1"] == 2
        first.is_kept = True
    with pytest.raises(RuntimeError), service.admit(1, client_id="key:1"):
        raise RuntimeError
    assert service.admission.num_by_client["key:1"] == 2
    first.release()
    first.release()
    assert (service.admission.num_by_client.get("key:1", 0), len(service.admission.num_by_client)) == (0, 0)


def test_one_client_does_not_take_the_places_of_another() -> None:
    service: Service = make_app(max_queued_requests=9, max_requests_per_key=3).state.service
    with service.admit(2, client_id="key:1"), service.admit(3, client_id="key:2"):
        with pytest.raises(ApiError) as refused, service.admit(2, client_id="key:1"):
            pass
        assert (refused.value.status, refused.value.code) == (429, "key_limit")
        with service.admit(1, client_id="key:1"):
            assert service.admission.num_by_client["key:1"] == 3
    with pytest.raises(ApiError) as refused, service.admit(4, client_id="key:1"):
        pass
    assert (refused.value.status, refused.value.param) == (400, "prompt")
    assert "max_requests_per_key" in refused.value.message
