"""What went wrong when AWS was asked, and what to do, in words. Pure; imports neither boto3 nor botocore."""

from __future__ import annotations

import json
from typing import Any

MAX_MESSAGE = 300

_NOT_ALLOWED = frozenset({"UnauthorizedOperation", "AccessDenied", "AccessDeniedException"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired"})
_BAD_KEYS = frozenset(
    {"AuthFailure", "InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException", "OptInRequired"}
)
_THROTTLED = frozenset({"RequestLimitExceeded", "Throttling", "ThrottlingException", "RequestThrottled"})


def policy_line(action: str) -> str:
    """Statement of an IAM policy that allows one call, such as ``DescribeSecurityGroups``."""
    return json.dumps({"Effect": "Allow", "Action": f"ec2:{action}", "Resource": "*"})


def explain(action: str, error: BaseException, *, region: str, profile: str = "") -> str:
    """Why a call gave nothing, with what to do.

    Args:
        action: name of the call, such as ``DescribeInstances``.
        error: what boto3 raised.
        region: that was asked; empty if none is known.
        profile: of the AWS configuration that was named; empty for the usual chain.
    """
    response: Any = getattr(error, "response", None)
    details = response.get("Error") if isinstance(response, dict) else None
    if isinstance(details, dict) and details.get("Code"):
        return _by_code(action, str(details["Code"]), _short(details.get("Message", "")), region)
    return _by_class(error, region, profile)


def _by_code(action: str, code: str, message: str, region: str) -> str:
    if code in _NOT_ALLOWED:
        return f"these AWS credentials may not call ec2:{action}; add to their IAM policy: {policy_line(action)}"
    if code in _EXPIRED:
        return f"the AWS credentials have expired ({code}); log in again, for example with `aws sso login`"
    if code in _BAD_KEYS:
        return (
            f"AWS does not accept these credentials in {region} ({code}: {message}); check them with "
            "`aws sts get-caller-identity`, that the region is enabled for the account, and this machine's clock"
        )
    if code in _THROTTLED:
        return f"AWS limits the rate of calls to ec2:{action} and refused three attempts ({code}); try again later"
    if code.startswith("Invalid") and code.endswith("NotFound"):
        return f"{message or code} ({code}): probably the wrong region; {region} was asked, set `aws.region`"
    if code in ("500", "501", "502", "503", "InternalError", "ServiceUnavailable", "Unavailable", "InternalFailure"):
        return f"AWS had a fault of its own in ec2:{action} ({code}: {message}); try again later"
    return f"ec2:{action} failed: {code}: {message}"


def _by_class(error: BaseException, region: str, profile: str) -> str:
    names = {kind.__name__ for kind in type(error).__mro__}
    message = _short(error)
    if names & {"ProfileNotFound"}:
        return f"the AWS profile {profile!r} is not configured on this machine; check `aws.profile` and ~/.aws/config"
    if names & {"NoRegionError", "InvalidRegionError"}:
        return f"no usable AWS region is known ({message}); set `aws.region` in the cluster file"
    if names & {"NoCredentialsError", "PartialCredentialsError"}:
        return (
            "no AWS credentials were found (environment, profile, SSO, instance role); log in, set `aws.profile`, or "
            "give recorded answers with --aws-facts FILE"
        )
    if names & {"SSOError", "TokenRetrievalError", "LoginError", "NoAuthTokenError", "UnauthorizedSSOTokenError"}:
        return f"the AWS login has ended ({message}); log in again, for example with `aws sso login`"
    if names & {"CredentialRetrievalError", "MetadataRetrievalError", "RefreshWithMFAUnsupportedError"}:
        return f"the AWS credentials could not be fetched: {message}"
    if names & {"ConnectTimeoutError", "EndpointConnectionError", "ReadTimeoutError", "ConnectionClosedError"}:
        return (
            f"the EC2 API of {region or 'this region'} does not answer ({message}); check the network, a proxy "
            "(HTTPS_PROXY) and the name of the region"
        )
    if names & {"ResponseParserError"}:
        return f"what answered is not the EC2 API (a proxy or a captive portal?): {message}"
    if names & {"ProxyConnectionError", "SSLError", "HTTPClientError"}:
        return f"the connection to the EC2 API failed: {message}"
    return f"asking AWS failed: {type(error).__name__}: {message}"


def _short(value: object) -> str:
    # A refusal may carry an encoded message of kilobytes.
    words = " ".join(str(value).split())
    return words if len(words) <= MAX_MESSAGE else words[: MAX_MESSAGE - 3] + "..."
