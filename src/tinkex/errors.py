"""Every error that tinkex raises for its users, in one tree.

    TinkerError                         code, retryable, request_id
    ├── APIError                        message, request, body
    │   ├── APIResponseValidationError  + response, status_code
    │   ├── APIStatusError              + response, status_code
    │   │   ├── BadRequestError            400
    │   │   ├── AuthenticationError        401
    │   │   ├── BillingError               402
    │   │   ├── PermissionDeniedError      403
    │   │   ├── NotFoundError              404
    │   │   ├── ConflictError              409
    │   │   ├── PromiseLostError           410
    │   │   ├── UnprocessableEntityError   422
    │   │   ├── RateLimitError             429
    │   │   └── InternalServerError        >= 500
    │   ├── APIConnectionError
    │   │   └── APITimeoutError
    │   └── ProxyError                  + status_code: a proxy refused the connection
    ├── RequestFailedError              message, request_id, category
    ├── InputError          (ValueError)    a bad argument, named by its path
    │   ├── InputTypeError  (TypeError)     ... of the wrong type
    │   └── NothingToTrain  (AssertionError)  every train_* flag is off
    ├── CredentialError                     no usable key
    ├── MissingPackageError (ImportError)   an optional package is not installed
    ├── ServerSilentError   (TimeoutError)  no reply from the server for too long
    ├── ClosedError         (RuntimeError)  the client was closed, or its loop ended
    │   └── ForkedError                     the client belongs to the parent process
    ├── TokenizerError      (RuntimeError)  the model's tokenizer cannot be loaded
    ├── ChatTemplateError   (RuntimeError)  a model's chat template cannot render these messages
    ├── DataError           (ValueError)    a data file has bad lines; all of them are listed
    ├── ModelError          (RuntimeError)  a base model's files cannot be used
    ├── EngineDiedError     (RuntimeError)  the engine's process ended while work was pending
    ├── StorageError        (RuntimeError)  data cannot be stored: a disk, database or bucket fails
    └── ResultError         (RuntimeError)  the server's answer breaks the protocol

All of them pickle, and none ever holds a credential: `request` and `response` are small
records without headers that could carry one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

ErrorCategory = Literal["unknown", "server", "user"]

# So much of a caller's value appears in an error.
_QUOTED = 100


@dataclass(frozen=True, slots=True)
class RequestInfo:
    """The request behind an error, without credentials."""

    method: str
    url: str


@dataclass(frozen=True, slots=True)
class ResponseInfo:
    """The reply behind an error."""

    status_code: int
    headers: dict[str, str] = field(default_factory=dict[str, str])
    text: str = ""
    request: RequestInfo | None = None


class TinkerError(Exception):
    """Root of the tree."""

    code: ClassVar[str] = "error"
    retryable: bool = False
    request_id: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions rebuild from `args` by default, which breaks any constructor that is
        # not exactly `(*args)`. Rebuilding without __init__ works for every subclass.
        return (_rebuild, (type(self), self.args, self.__dict__.copy()))


def _rebuild(kind: type[TinkerError], args: tuple[Any, ...], state: dict[str, Any]) -> TinkerError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class APIError(TinkerError):
    """Something went wrong while talking to the server."""

    code = "api_error"

    def __init__(self, message: str, request: Any = None, *, body: object = None) -> None:
        super().__init__(message)
        self.message = message
        self.request = request
        self.body = body


class APIResponseValidationError(APIError):
    """The server answered, but not with what the protocol says."""

    code = "bad_response"

    def __init__(self, response: Any, body: object, message: str | None = None) -> None:
        super().__init__(
            message or "The server's answer does not match the protocol.",
            getattr(response, "request", None),
            body=body,
        )
        self.response = response
        self.status_code = cast("int", response.status_code)


class APIStatusError(APIError):
    """The server answered with an error status."""

    code = "status_error"

    def __init__(self, message: str, response: Any, body: object = None) -> None:
        super().__init__(message, getattr(response, "request", None), body=body)
        self.response = response
        self.status_code = cast("int", response.status_code)
        if response.status_code == 408:
            self.retryable = True  # a time-out that the server reports


class BadRequestError(APIStatusError):
    """400: the request is wrong; sending it again will not help."""

    code = "bad_request"


class AuthenticationError(APIStatusError):
    """401: the key is missing, wrong or revoked."""

    code = "authentication"


class BillingError(APIStatusError):
    """402: the account cannot pay for this."""

    code = "billing"
    retryable = True


class PermissionDeniedError(APIStatusError):
    """403: the key is valid, but does not allow this."""

    code = "permission_denied"


class NotFoundError(APIStatusError):
    """404: not found, or not visible to this key."""

    code = "not_found"


class ConflictError(APIStatusError):
    """409: the server's state does not allow it now."""

    code = "conflict"
    retryable = True


class PromiseLostError(APIStatusError):
    """410: the server no longer has this result, or the session is over."""

    code = "promise_lost"
    retryable = True


class UnprocessableEntityError(APIStatusError):
    """422: the request is well-formed but invalid."""

    code = "unprocessable"


class RateLimitError(APIStatusError):
    """429: too many requests."""

    code = "rate_limit"
    retryable = True


class InternalServerError(APIStatusError):
    """5xx: the server failed."""

    code = "server_error"
    retryable = True


class APIConnectionError(APIError):
    """The server could not be reached, or the connection broke."""

    code = "connection"
    retryable = True

    def __init__(self, request: Any = None, message: str = "Connection error.") -> None:
        super().__init__(message, request)


class APITimeoutError(APIConnectionError):
    """One HTTP request took too long."""

    code = "timeout"

    def __init__(self, request: Any = None, message: str = "Request timed out.") -> None:
        super().__init__(request, message)


class ProxyError(APIError):
    """The proxy between this process and the server refused; the server got no request.

    `status_code` is the proxy's answer: 407 wants other credentials, 403 forbids the server.
    """

    code = "proxy"

    def __init__(self, message: str, request: Any = None, *, status_code: int) -> None:
        super().__init__(message, request)
        self.status_code = status_code


class RequestFailedError(TinkerError):
    """The server accepted the request and later reported that it failed."""

    code = "request_failed"

    def __init__(self, message: str, request_id: str | None, category: ErrorCategory) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.category: ErrorCategory = category
        self.retryable = category != "user"


class InputError(TinkerError, ValueError):
    """An argument is wrong. `path` names it, such as `data[3].loss_fn_inputs["weights"]`."""

    code = "bad_input"

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(f"{path}: {message}" if path else message)
        self.path = path
        self.reason = message


class InputTypeError(InputError, TypeError):
    """An argument has the wrong type."""

    code = "bad_input_type"


def whole_text(text: str, path: str) -> str:
    """`text` itself; raises InputError where it has half a character, which JSON can write."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"character {error.start} is half of a surrogate pair, which is no text", path
            ) from None
    return text


def shortened(text: str) -> str:
    """A caller's text as an error shows it: cut where it is long."""
    return text if len(text) <= 2 * _QUOTED else f"{text[:_QUOTED]}…"


def quoted(value: object) -> str:
    """A caller's value as an error shows it: its repr, cut where that is long."""
    if isinstance(value, str | bytes | list | tuple):
        items = cast("Sequence[object]", value)
        whole, text = len(items) <= _QUOTED, repr(items[:_QUOTED])
    elif isinstance(value, int) and value.bit_length() > _QUOTED:
        return f"a number of {value.bit_length()} bits"
    else:
        whole, text = True, repr(value)
    return text if whole and len(text) <= 2 * _QUOTED else f"{text[:_QUOTED]}…"


class NothingToTrain(InputError, AssertionError):
    """All three train flags are off; an AssertionError too, as in the official client."""

    code = "nothing_to_train"


class CredentialError(TinkerError):
    """There is no usable credential; the message says where one can come from."""

    code = "credential"


class MissingPackageError(TinkerError, ImportError):
    """An optional package is needed for this and not installed."""

    code = "missing_package"

    def __init__(self, reason: str, package: str) -> None:
        super().__init__(f"{reason}: pip install {package}")
        self.package = package


class ServerSilentError(TinkerError, TimeoutError):
    """The server did not reply for too long."""

    code = "server_silent"
    retryable = True


class ClosedError(TinkerError, RuntimeError):
    """The client was closed, or the loop it runs on has ended."""

    code = "closed"


class ForkedError(ClosedError):
    """The client was made in the parent process and cannot be used after a fork."""

    code = "forked"


class TokenizerError(TinkerError, RuntimeError):
    """The tokenizer cannot be loaded; the message says what to install or fetch."""

    code = "tokenizer"


class ChatTemplateError(TinkerError, RuntimeError):
    """A model's chat template is missing or broken, or cannot render these messages.

    Also raised where a rendered conversation does not begin with what a sampler would be given: a
    model trained on it would later get another prompt than it was trained on.
    """

    code = "chat_template"


@dataclass(frozen=True, slots=True)
class DataProblem:
    """What is wrong with one line of a data file; line 0 is the file as a whole."""

    line: int
    reason: str


class DataError(TinkerError, ValueError):
    """A data file cannot be used. `problems` has every bad line; the message shows the first."""

    code = "data"

    def __init__(self, source: str, problems: Sequence[DataProblem]) -> None:
        super().__init__(_data_message(source, problems))
        self.source = source
        self.problems = tuple(problems)


_MOST_PROBLEMS_SHOWN = 20


def _data_message(source: str, problems: Sequence[DataProblem]) -> str:
    if len(problems) == 1 and problems[0].line == 0:
        return f"{source}: {problems[0].reason}"
    count = f"{len(problems)} bad lines" if len(problems) > 1 else "1 bad line"
    shown = [f"  line {one.line}: {one.reason}" for one in problems[:_MOST_PROBLEMS_SHOWN]]
    if len(problems) > len(shown):
        shown.append(f"  and {len(problems) - len(shown)} more")
    return "\n".join([f"{source}: {count}", *shown])


class ModelError(TinkerError, RuntimeError):
    """A base model's files cannot be used; the message names the file and the tensor."""

    code = "model"


class EngineDiedError(TinkerError, RuntimeError):
    """The engine's process has ended; the message says how. What it held in memory is lost."""

    code = "engine_died"
    retryable = True


class StorageError(TinkerError, RuntimeError):
    """Data cannot be stored: a full, read-only or unreachable disk, database or bucket.

    The message names the place and says what to do. Nothing half-written stays behind, so the
    same call works once the storage does.
    """

    code = "storage"
    retryable = True

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        # Whether it may be well and only cannot be reached.
        self.out_of_reach = False


class ResultError(TinkerError, RuntimeError):
    """The server's result lacks something that was asked for."""

    code = "bad_result"


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    402: BillingError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    410: PromiseLostError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}


def status_error(response: ResponseInfo, body: object) -> APIStatusError:
    """The error of the tree for an HTTP status."""
    kind = _BY_STATUS.get(response.status_code)
    if kind is None:
        kind = InternalServerError if response.status_code >= 500 else APIStatusError
    return kind(f"Error code: {response.status_code} - {body}", response, body)


def code_of(error: BaseException) -> str:
    """The code of an error's class in this tree; `other` for any other error."""
    for kind in type(error).__mro__:
        if kind.__module__ == __name__ and issubclass(kind, TinkerError):
            return kind.code
    return "other"


class ExperimentalWarning(FutureWarning):
    """Marks calls whose signature may still change."""
