"""`kvledger doctor`: looks at what serving needs and says what is wrong and how to mend it.

With --isolation it looks at a server that runs instead, and at how it keeps two tenants apart.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from kvledger import _core
from kvledger.address import why_not_free
from kvledger.cli.findings import Finding, show
from kvledger.errors import ModelRefused, SettingRefused
from kvledger.log import configure
from kvledger.memory import memory_available, memory_limit
from kvledger.models.catalogue import CATALOGUE
from kvledger.settings import Settings, load_settings


def run(arguments: Sequence[str]) -> int:
    """Prints the report, with the settings of `kvledger serve`; 0 if all is well, else 1."""
    if "--isolation" in arguments:
        from kvledger.cli import isolation

        return isolation.run([each for each in arguments if each != "--isolation"])
    try:
        settings = load_settings(arguments, command="kvledger doctor")
    except SettingRefused as error:
        print(f"kvledger doctor: {error}", file=sys.stderr)
        return 2
    configure("console", "error")
    all_good = True
    for check in (_processor, _memory, _model, _port, _tls, _tenants, _self_test):
        try:
            finding = check(settings)
        except (ModelRefused, SettingRefused) as error:
            finding = Finding(False, check.__name__.strip("_").replace("_", "-"), str(error))
        all_good = show(finding) and all_good
    return 0 if all_good else 1


def _processor(settings: Settings) -> Finding:
    sets = _core.instruction_sets()
    kernels = _core.CpuKernels(settings.kernel_threads, "auto")
    text = f"kernels {sets[-1]}, {settings.kernel_threads} threads"
    if settings.kernel_threads > 1:
        text += f", meeting takes {_barrier_seconds(kernels) * 1e9:.0f} ns"
    return Finding(True, "processor", text)


def _memory(settings: Settings) -> Finding:
    del settings
    available, limit = memory_available(), memory_limit()
    return Finding(
        available >= 1 << 30,
        "memory",
        f"{available / 1e9:.1f} GB free of {limit / 1e9:.1f} GB that this process may use",
        "free at least 1 GB, or give the container more",
    )


def _model(settings: Settings) -> Finding:
    known = CATALOGUE.get(settings.model)
    if known is None or known.is_fetched:
        from kvledger.models.catalogue import model_path
        from kvledger.models.model_file import ModelFile
        from kvledger.models.opening import model_folder
        from kvledger.models.safetensors_file import SafetensorsModel

        folder = model_folder(settings.model)
        if folder is not None:
            with SafetensorsModel(folder) as tensors:
                fingerprint = tensors.fingerprint()
            return Finding(True, "model", f"{folder}, SHA-256 {fingerprint[:16]}...")
        path = model_path(settings.model)
        fingerprint = ModelFile(path).fingerprint
        good = known is None or fingerprint == known.sha256
        mend = f"delete {path} and run: kvledger models fetch"
        return Finding(good, "model", f"{path}, SHA-256 {fingerprint[:16]}...", mend)
    return Finding(
        False, "model", f"{known.name} is not fetched", f"kvledger models fetch {known.name}"
    )


def _port(settings: Settings) -> Finding:
    for option, address in settings.addresses.items():
        mend = f"stop what listens there, or choose another {option}"
        if (reason := why_not_free(address)) is not None:
            return Finding(False, "port", f"{address}: {reason}", mend)
    several = list(settings.addresses.values())
    verb = "is" if len(several) == 1 else "are"
    return Finding(True, "port", f"{', '.join(several)} {verb} free")


def _tls(settings: Settings) -> Finding:
    clients, operators = settings.certificates(), settings.operators_certificates()
    files = clients or operators
    if files is None:
        return Finding(True, "tls", "not asked for")
    asks = "asks clients for theirs" if files.current.client_ca else "asks clients for none"
    validity = files.current.validity
    end = f"{validity.ends:%Y-%m-%d %H:%M} UTC"
    renew = "renew it; a running server takes the new one without a restart"
    kind = validity.why_not_well()
    if kind == "expired":
        return Finding(False, "tls", f"{settings.tls_cert} expired on {end}", renew)
    if kind == "not_yet_valid":
        begin = f"{validity.begins:%Y-%m-%d %H:%M} UTC"
        mend = "look at this machine's clock, or take the one before"
        return Finding(False, "tls", f"{settings.tls_cert} is not valid before {begin}", mend)
    until = f"expires soon, on {end}: {renew}" if kind else f"expires on {end}"
    return Finding(True, "tls", f"{settings.tls_cert} has its key and {until}; the server {asks}")


def _tenants(settings: Settings) -> Finding:
    if settings.tenants is None:
        return Finding(True, "tenants", "none: only --dev serves, and everybody as one")
    count = len(settings.registry().tenants())
    issuer = ", and signed tokens" if settings.jwt is not None else ""
    return Finding(True, "tenants", f"{settings.tenants} has {count}{issuer}")


def _self_test(settings: Settings) -> Finding:
    """Loads the model with a small pool, generates one token, and looks at its chat template."""
    known = CATALOGUE.get(settings.model)
    if known is not None and not known.is_fetched:
        return Finding(False, "self-test", "not run: there is no model", "fetch the model first")
    from kvledger.self_test import try_model

    started = time.monotonic()
    tried = try_model(settings)
    seconds = time.monotonic() - started
    return Finding(
        tried.token is not None,
        "self-test",
        f"loaded and generated one token in {seconds:.1f} s"
        if tried.token is not None
        else "the model's output is not a number",
        "the model file is unusable: try another one",
        # None of it is a fault of this machine.
        tuple(Finding(True, "history", sentence) for sentence in tried.history),
    )


def _barrier_seconds(kernels: _core.CpuKernels) -> float:
    """Time of one meeting of all threads, over enough of them to be measured, and no more."""
    rounds = 64
    while True:
        started = time.perf_counter()
        kernels.barriers(rounds)
        seconds = time.perf_counter() - started
        if seconds > 0.02:
            return seconds / rounds
        rounds *= 4
