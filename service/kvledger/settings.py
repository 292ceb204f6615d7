"""Settings of a server: command line > environment (KVLEDGER_*) > TOML file > defaults.

Unknown keys are refused wherever they stand, because a misspelt limit that is ignored is worse than
a server that does not start.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from kvledger.address import socket_path, why_no_address
from kvledger.books.options import BooksSettings
from kvledger.certificates import CertificateFiles
from kvledger.errors import SettingRefused
from kvledger.log import LogFormat, LogLevel
from kvledger.models.config import WeightsMode
from kvledger.scopes.prefix_files import PrefixFile, prefix_files
from kvledger.tenants.authentication import Transport
from kvledger.tenants.registry import Registry

_ENVIRONMENT = "KVLEDGER_"
# Variables with the prefix that are no settings: what the build, the tests and clients read.
_OTHER_VARIABLES = frozenset(
    {"KVLEDGER_CUDA", "KVLEDGER_TEST_MODEL", "KVLEDGER_BUILD_TYPE", "KVLEDGER_TOKEN"}
)


# The value of --operators-listen that turns it off.
NOWHERE = "none"


class Settings(BooksSettings, BaseSettings):
    """Everything that can be set, with units in the descriptions."""

    model_config = SettingsConfigDict(
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_exit_on_error=False,
        validate_default=False,
        frozen=True,
    )

    listen: str = Field("127.0.0.1:50051", description="host:port or unix:/path to serve on")
    tls_cert: Path | None = Field(
        None, description="PEM file with the certificate and its chain; read again when it changes"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key")
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file with authorities: a client without a certificate that one of them "
        "signed is refused",
    )
    tenants: Path | None = Field(
        None,
        description="file of tenants and their credentials, of mode 0600 (kvledger tenants writes "
        "it); read again when it changes",
    )
    jwt: Path | None = Field(
        None,
        description="file of an issuer of signed tokens (JWT) and its public keys; read again when "
        "it changes",
    )
    otlp: str | None = Field(
        None,
        description="http://host:port or https://host:port of an OpenTelemetry collector that "
        "takes OTLP over gRPC: traces and metrics of requests go there; needs kvledger[otel]",
    )
    operators_listen: str | None = Field(
        None,
        description="host:port or unix:/path for operators (health, channelz), or none; default: a "
        "unix socket of this user's beside that of --listen, or in the runtime folder",
    )
    operators_client_ca: Path | None = Field(
        None,
        description="PEM file with authorities, for --operators-listen host:port with TLS: an "
        "operator without a certificate that one of them signed is refused",
    )
    metrics_listen: str | None = Field(
        None,
        description="host:port or unix:/path to serve Prometheus metrics on, over plain HTTP; "
        "default: nowhere",
    )
    metrics_aliases: Literal["none", "vllm"] = Field(
        "none", description="whether metrics have the names of another server's too"
    )
    metrics_tenants: int = Field(
        100,
        ge=0,
        le=4096,
        description="most tenants with metrics of their own, those that use most; 0 is none",
    )
    metrics_gap_target: float | None = Field(
        None,
        gt=0.0,
        le=60.0,
        description="seconds between two tokens that metrics count as in time; default: "
        "--tpot-target, or 0.1",
    )
    max_connections: int = Field(
        1024, ge=1, le=1 << 20, description="most connections; one more is closed"
    )
    model: str = Field(
        "smollm2-135m-instruct",
        description="name of a known model, path of a GGUF file or of a folder with safetensors, "
        "or org/name@commit on the hub",
    )
    download: bool = Field(
        False, description="fetch a model of the hub that is not in its cache yet"
    )
    weights: WeightsMode = Field(
        "stored",
        description="how weights are kept in memory: as the file stores them, or as floats",
    )
    kv_format: Literal["bf16", "f32"] = Field("bf16", description="how keys and values are stored")
    kv_bytes: ByteSize | None = Field(
        None, description="size of the KV pool, such as 4GiB; default: a quarter of free memory"
    )
    kv_blocks: int | None = Field(
        None, ge=1, le=2**31 - 1, description="size of the KV pool in blocks, instead of --kv-bytes"
    )
    block_tokens: int = Field(
        32, description="tokens per block in bf16, a power of two from 8 to 256"
    )
    token_budget: int = Field(
        256, ge=1, le=1 << 20, description="most tokens that one step computes"
    )
    max_sequences: int | None = Field(
        None,
        ge=1,
        le=1 << 16,
        description="most sequences running at once; default: 64, or the token budget if less",
    )
    prefix_reuse: Literal["on", "off"] = Field(
        "on", description="whether prompts may begin with cached blocks of earlier ones"
    )
    public_prefix: list[str] = Field(
        [],
        description="NAME=FILE, for each public prefix: a text that every tenant's prompts may "
        "begin with and share, computed at the start",
    )
    public_system: list[str] = Field(
        [], description="the same, where the file is the system message of chats"
    )
    tpot_target: float | None = Field(
        None,
        gt=0.0,
        le=60.0,
        description="seconds that a step may take while somebody decodes: prompts are computed in "
        "chunks that fit; default: no target, only --step-stretch",
    )
    step_stretch: float = Field(
        2.0,
        ge=0.0,
        le=1000.0,
        description="how many times longer a step with prompt tokens may take than decoding alone "
        "would; 0 is no limit",
    )
    prefill_step: float = Field(
        0.05,
        ge=0.0,
        le=60.0,
        description="seconds that a step may take while nobody decodes and several tenants come: "
        "whoever comes meanwhile waits no longer; 0 is no limit",
    )
    machine_peaks: Literal["measure", "skip"] = Field(
        "measure",
        description="whether to measure at the first start what this machine can do at most, for "
        "`kvledger diagnose`; two seconds, kept for later starts",
    )
    mailbox_tokens: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="tokens that wait for a slow reader before its sequence pauses",
    )
    stall_timeout: float = Field(
        30.0,
        gt=0.0,
        le=3600.0,
        description="seconds that a sequence pauses for its reader before it ends",
    )
    max_queued: int = Field(
        256, ge=1, le=1 << 20, description="most requests waiting; one more is refused"
    )
    max_queued_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="most prompt tokens of all requests waiting; a prompt that would exceed it is "
        "refused; default: no limit but --max-queued",
    )
    priority_aging: float = Field(
        5.0, ge=0.0, le=3600.0, description="seconds of waiting that one level of priority is worth"
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="threads of the CPU kernels; default: all processors"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    kernels: Literal["core", "torch"] = Field(
        "core", description="the core's kernels, or plain torch as a reference (slow)"
    )
    instruction_set: str = Field(
        "auto", description="auto, portable, avx2 or avx512, for the core's kernels"
    )
    dev: bool = Field(
        False, description="serve callers without identity, as one tenant; for development"
    )
    reflection: bool | None = Field(
        None,
        description="describe the services to whoever asks, as grpcurl does; default: with --dev",
    )
    drain_timeout: float = Field(
        30.0,
        ge=0.0,
        le=3600.0,
        description="seconds that running streams get to end after SIGTERM",
    )
    heartbeat_timeout: float = Field(
        5.0,
        ge=1.0,
        le=600.0,
        description="seconds without progress after which health says NOT_SERVING",
    )
    log_format: LogFormat = Field("auto", description="auto, json or console")
    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    config: Path | None = Field(None, description="a TOML file with settings by these names")

    @field_validator("*", mode="before")
    @classmethod
    def _no_number_for_a_flag(cls, value: Any, info: ValidationInfo) -> Any:
        """A file's `true` is no 1: pydantic would take it for one."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind is not bool and kind != bool | None:
            raise PydanticCustomError("no_flag", "it is no flag that is on or off")
        return value

    @field_validator("public_prefix", "public_system", mode="before")
    @classmethod
    def _several_in_a_variable(cls, value: Any) -> Any:
        """The environment has one text for all of them."""
        return value.split(",") if isinstance(value, str) else value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The order in which sources win; the command line is put before these.

        `load_settings` gives what the environment says as init_settings.
        """
        del env_settings, dotenv_settings, file_secret_settings
        return init_settings, _TomlSource(settings_cls, init_settings)

    @property
    def sequences_max(self) -> int:
        """Most sequences running at once, with the default worked out."""
        return self.max_sequences if self.max_sequences is not None else min(64, self.token_budget)

    @property
    def kernel_threads(self) -> int:
        """Threads of the kernels, with the default worked out."""
        return self.threads if self.threads is not None else len(os.sched_getaffinity(0))

    def require_identity(self) -> None:
        """Raises SettingRefused if the server could not tell its callers apart."""
        if self.dev:
            return
        if self.tenants is None:
            raise SettingRefused(
                "--tenants FILE says who may call (kvledger tenants add makes one); without it "
                "only --dev starts: it serves every caller as one tenant; use it where nobody else "
                "can connect"
            )
        if self.transport is Transport.PLAIN:
            raise SettingRefused(
                "--listen host:port needs --tls-cert and --tls-key: without TLS whoever is on the "
                "line can read credentials; or use unix:/path"
            )

    def registry(self, on_kept: Callable[[], None] = lambda: None) -> Registry:
        """Who may call. SettingRefused if the files that say so cannot be used."""
        return Registry(self.tenants, issuer_path=self.jwt, dev=self.dev, on_kept=on_kept)

    @property
    def transport(self) -> Transport:
        """How clients reach it."""
        return self._transport(self.listen, self.tls_client_ca)

    @property
    def operators_transport(self) -> Transport:
        """How operators reach it; by itself on a unix socket."""
        listen = self.operators_listen if self.operators_on_tcp else None
        return self._transport(listen, self.operators_client_ca)

    def _transport(self, listen: str | None, client_ca: Path | None) -> Transport:
        if listen is None or socket_path(listen) is not None:
            return Transport.UNIX
        if self.tls_cert is None:
            return Transport.PLAIN
        return Transport.TLS if client_ca is None else Transport.MUTUAL_TLS

    @property
    def reuses_prefixes(self) -> bool:
        """Whether prompts may begin with cached blocks."""
        return self.prefix_reuse == "on"

    def public_files(self) -> list[PrefixFile]:
        """The files of public prefixes, not read yet. Raises SettingRefused."""
        return prefix_files(self.public_prefix, self.public_system)

    @property
    def gap_target(self) -> float:
        """Seconds between two tokens that are in time, with the default worked out."""
        return self.metrics_gap_target or self.tpot_target or 0.1

    @property
    def reflects(self) -> bool:
        """Whether the services describe themselves, with the default worked out."""
        return self.reflection if self.reflection is not None else self.dev

    def certificates(self) -> CertificateFiles | None:
        """What the files of TLS hold; None without TLS. SettingRefused if they cannot be used."""
        if self.tls_cert is None or self.tls_key is None or socket_path(self.listen):
            return None
        return CertificateFiles(self.tls_cert, self.tls_key, self.tls_client_ca)

    def operators_certificates(self) -> CertificateFiles | None:
        """The same for the operators' listener, whose callers have authorities of their own."""
        if self.tls_cert is None or self.tls_key is None or not self.operators_on_tcp:
            return None
        return CertificateFiles(
            self.tls_cert, self.tls_key, self.operators_client_ca, "--operators-client-ca"
        )

    @property
    def addresses(self) -> dict[str, str]:
        """Where it is told to listen, by option."""
        asked = {
            "--listen": self.listen,
            "--operators-listen": self.operators_listen,
            "--metrics-listen": self.metrics_listen,
        }
        return {
            option: address
            for option, address in asked.items()
            if address is not None and (option, address) != ("--operators-listen", NOWHERE)
        }

    @property
    def operators_on_tcp(self) -> bool:
        """Whether operators are listened to on a port."""
        listen = self.operators_listen
        return listen not in (None, NOWHERE) and socket_path(str(listen)) is None

    def require_closed_doors(self) -> None:
        """Raises SettingRefused where strangers could reach what is for operators."""
        if self.dev:
            return
        if self.operators_on_tcp and not (self.tls_cert and self.operators_client_ca):
            raise SettingRefused(
                "--operators-listen host:port needs --tls-cert, --tls-key and "
                "--operators-client-ca: without them whoever reaches the port is an operator; "
                "or use unix:/path"
            )
        if self.metrics_listen is not None and socket_path(self.metrics_listen) is None:
            raise SettingRefused(
                "--metrics-listen host:port is plain HTTP, which whoever reaches the port can "
                "read; without --dev use unix:/path"
            )


class _TomlSource(TomlConfigSettingsSource):
    """The file that `config` names; its keys are the settings' names, with - or _."""

    def __init__(
        self, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource
    ) -> None:
        path = init_settings().get("config")
        super().__init__(settings_cls, Path(path) if path else None)

    def _read_file(self, file_path: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in super()._read_file(file_path).items():
            name = key.replace("-", "_")
            if name in values:
                raise ValueError(f"{name} is given twice, once with - and once with _")
            if name == "config":
                raise ValueError("config is no setting of a file: it would name another one")
            values[name] = value
        return values


def load_settings(
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    command: str = "kvledger serve",
) -> Settings:
    """Settings from a command line and the environment. SettingRefused, in one sentence.

    `command` is what its help calls itself.
    """
    environment = os.environ if environment is None else environment
    given = _environment_values(environment)
    path = _config_path(arguments, environment)
    try:
        if path is not None and not path.is_file():
            raise SettingRefused(f"--config {path}: there is no such file")
        given["config"] = path
        settings = Settings(
            _cli_settings_source=CliSettingsSource(  # type: ignore[call-arg]
                Settings, cli_parse_args=list(arguments), cli_prog_name=command
            ),
            **given,
        )
    except SettingsError as error:  # of the command line's parser
        reason = str(error).removeprefix("error parsing CLI: ")
        raise SettingRefused(f"{reason}{_near_option(reason)}; see {command} --help") from None
    except ValidationError as error:
        raise SettingRefused(_sentence(error)) from None
    except OSError as error:
        raise SettingRefused(f"--config {path}: {error.strerror or error}") from None
    except ValueError as error:  # of the TOML reader: it names line and column
        raise SettingRefused(f"--config {path}: {error}") from None
    _check(settings)
    return settings


def _config_path(arguments: Sequence[str], environment: Mapping[str, str]) -> Path | None:
    """The TOML file's path, which must be known before the other sources are read."""
    named = environment.get(_ENVIRONMENT + "CONFIG")
    for index, argument in enumerate(arguments):  # the last one wins, as with every option
        if argument == "--config" and index + 1 < len(arguments):
            named = arguments[index + 1]
        elif argument.startswith("--config="):
            named = argument.removeprefix("--config=")
    return Path(named) if named is not None else None


def _environment_values(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the variables with the prefix say, by setting; SettingRefused for one that is none."""
    known = {_ENVIRONMENT + name.upper(): name for name in Settings.model_fields}
    values = {}
    for variable in sorted(environment):
        upper = variable.upper()
        if upper in known:
            values[known[upper]] = environment[variable]
        elif upper.startswith(_ENVIRONMENT) and upper not in _OTHER_VARIABLES:
            near = difflib.get_close_matches(upper, sorted(known), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingRefused(f"the environment variable {variable} is no setting{hint}")
    return values


def _near_option(reason: str) -> str:
    """A hint at what an argument that the parser does not know was meant to be."""
    options = [f"--{name.replace('_', '-')}" for name in Settings.model_fields]
    for argument in reason.split() if reason.startswith("unrecognized") else ():
        near = difflib.get_close_matches(argument.partition("=")[0], options, n=1)
        if near:
            return f"; did you mean {near[0]}?"
    return ""


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    name = str(first["loc"][0]) if first["loc"] else "settings"
    option = f"--{name.replace('_', '-')}"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name.replace("-", "_"), list(Settings.model_fields), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        return f"{name} is no setting{hint}"
    return f"{option}: {first['msg'][0].lower()}{first['msg'][1:]} (given: {first['input']!r})"


def _check(settings: Settings) -> None:
    """What pydantic cannot say: settings that contradict each other."""
    if settings.kv_bytes is not None and settings.kv_blocks is not None:
        raise SettingRefused("--kv-bytes and --kv-blocks say the same thing; give one of them")
    tokens = settings.block_tokens
    if not 8 <= tokens <= 256 or tokens & (tokens - 1):
        raise SettingRefused(f"--block-tokens: {tokens} is not a power of two from 8 to 256")
    if settings.token_budget < settings.sequences_max:
        raise SettingRefused(
            f"--token-budget {settings.token_budget} is less than --max-sequences "
            f"{settings.sequences_max}: every running sequence decodes a token a step; "
            f"raise the one or lower the other"
        )
    if settings.otlp is not None and not re.fullmatch(r"https?://[^/\s]+:\d+/?", settings.otlp):
        raise SettingRefused(
            f"--otlp: {settings.otlp} is not http://host:port or https://host:port"
        )
    settings.public_files()
    _check_addresses(settings)
    _check_tls(settings)
    if settings.jwt is not None and settings.tenants is None:
        raise SettingRefused("--jwt needs --tenants: signed tokens name tenants that stand there")


def _check_addresses(settings: Settings) -> None:
    """That each listener has an address that can be, and one of its own."""
    seen: dict[str, str] = {}
    for option, address in settings.addresses.items():
        if (reason := why_no_address(address)) is not None:
            raise SettingRefused(f"{option}: {reason}")
        if address in seen and not address.endswith(":0"):
            raise SettingRefused(f"{option} {address}: {seen[address]} is the same; give another")
        seen[address] = option


def _check_tls(settings: Settings) -> None:
    """That the files of TLS make a whole; what is in them is looked at when the server starts."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        given, other = ("cert", "key") if settings.tls_cert is not None else ("key", "cert")
        raise SettingRefused(f"--tls-{given} needs --tls-{other}: TLS takes both, or neither")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise SettingRefused("--tls-client-ca needs --tls-cert and --tls-key: it is a part of TLS")
    if settings.operators_client_ca is not None and (
        settings.tls_cert is None or not settings.operators_on_tcp
    ):
        raise SettingRefused(
            "--operators-client-ca needs --operators-listen host:port, --tls-cert and --tls-key: "
            "it is a part of TLS"
        )
    on_socket = socket_path(settings.listen) is not None
    if settings.tls_client_ca is not None and on_socket:
        raise SettingRefused("--tls-client-ca is for --listen host:port, not for a unix socket")
    if settings.tls_cert is not None and on_socket and not settings.operators_on_tcp:
        raise SettingRefused(
            "--tls-cert is for --listen host:port: a unix socket has no name to certify, and its "
            "file's mode says who may connect"
        )
