"""Settings: which source wins, what is refused, and whether the refusal says what to change."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from kvledger.address import host_and_port
from kvledger.errors import SettingRefused
from kvledger.settings import Settings, load_settings

# What each source says when it sets --token-budget, the strongest source first.
BUDGETS = {"arguments": 401, "environment": 302, "file": 203}
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in Settings.model_fields}


def refusal(
    *arguments: str, environment: dict[str, str] | None = None, command: str = "kvledger serve"
) -> str:
    """The sentence that refuses these settings."""
    with pytest.raises(SettingRefused) as refused:
        load_settings(arguments, environment or {}, command)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


def toml(folder: Path, text: str) -> str:
    """The path of a settings file with this text."""
    path = folder / "kvledger.toml"
    path.write_text(text)
    return str(path)


def loaded_from(sources: tuple[str, ...], folder: Path) -> Settings:
    """Settings where exactly these sources say something about the token budget."""
    arguments, environment = [], {}
    if "file" in sources:
        arguments += ["--config", toml(folder, f"token_budget = {BUDGETS['file']}")]
    if "environment" in sources:
        environment["KVLEDGER_TOKEN_BUDGET"] = str(BUDGETS["environment"])
    if "arguments" in sources:
        arguments += ["--token-budget", str(BUDGETS["arguments"])]
    return load_settings(arguments, environment)


@pytest.mark.parametrize(
    "sources", [c for n in (1, 2, 3) for c in combinations(BUDGETS, n)], ids="+".join
)
def test_the_strongest_source_wins(tmp_path: Path, sources: tuple[str, ...]) -> None:
    """An operator who overrides a setting would find the weaker source in force."""
    assert loaded_from(sources, tmp_path).token_budget == BUDGETS[sources[0]]


def test_without_sources_the_defaults_hold() -> None:
    """A server started with nothing would not be the one that the documentation describes."""
    settings = load_settings([], {})
    assert settings.listen == "127.0.0.1:50051"
    assert (settings.token_budget, settings.max_queued, settings.block_tokens) == (256, 256, 32)
    assert settings.kv_bytes is None
    assert settings.kv_blocks is None
    assert not settings.dev


def test_sources_add_up_setting_by_setting(tmp_path: Path) -> None:
    """A source that wins for one setting would wipe out what weaker ones say about others."""
    path = toml(tmp_path, 'log_level = "error"\ntoken-budget = 100\nmax_queued = 7\n')
    settings = load_settings(
        ["--config", path, "--max-queued", "9"], {"KVLEDGER_TOKEN_BUDGET": "200"}
    )
    assert settings.log_level == "error"
    assert settings.token_budget == 200
    assert settings.max_queued == 9


def test_a_flag_of_a_weaker_source_can_be_turned_off() -> None:
    """A server could not be started without --dev where the environment turns it on."""
    assert load_settings([], {"KVLEDGER_DEV": "true"}).dev
    assert not load_settings(["--no-dev"], {"KVLEDGER_DEV": "true"}).dev


def test_the_last_of_two_equal_options_wins(tmp_path: Path) -> None:
    """A script that appends an option to a command line would append it in vain."""
    first, second = tmp_path / "first", tmp_path / "second"
    for number, folder in enumerate((first, second), 1):
        folder.mkdir()
        toml(folder, f"max_queued = {number}")
    arguments = [f"--config={first / 'kvledger.toml'}", "--config", str(second / "kvledger.toml")]
    settings = load_settings([*arguments, "--threads", "1", "--threads", "2"], {})
    assert (settings.max_queued, settings.threads) == (2, 2)


def test_the_environment_names_the_file_and_the_command_line_another(tmp_path: Path) -> None:
    """KVLEDGER_CONFIG would be ignored, or win over --config."""
    other = tmp_path / "other"
    other.mkdir()
    named = {"KVLEDGER_CONFIG": toml(tmp_path, "max_queued = 1")}
    assert load_settings([], named).max_queued == 1
    assert load_settings(["--config", toml(other, "max_queued = 2")], named).max_queued == 2


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_misspelt_option_is_refused_with_the_right_one(name: str) -> None:
    """A misspelt limit that is ignored is worse than a server that does not start."""
    option = OPTIONS[name]
    sentence = refusal(option + "x", "1", command="kvledger doctor")
    assert f"unrecognized arguments: {option}x" in sentence
    assert f"did you mean {option}?" in sentence
    assert "kvledger doctor --help" in sentence


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_a_misspelt_variable_is_refused_with_the_right_one(name: str) -> None:
    """A deployment with a typing error in a variable would run with the default."""
    variable = f"KVLEDGER_{name.upper()}"
    sentence = refusal(environment={variable + "X": "1"})
    assert f"{variable}X is no setting; did you mean {variable}?" in sentence


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - {"config"}))
def test_a_misspelt_key_of_the_file_is_refused_with_the_right_one(
    tmp_path: Path, name: str
) -> None:
    """A file with a typing error would be read without that line."""
    sentence = refusal("--config", toml(tmp_path, f"{name}x = 1"))
    assert f"{name}x is no setting; did you mean {name}?" in sentence


def test_what_is_like_nothing_is_refused_without_a_hint(tmp_path: Path) -> None:
    """A hint at something unrelated would send people the wrong way."""
    for sentence in (
        refusal("--qqq", "1"),
        refusal("serve"),
        refusal(environment={"KVLEDGER_QQQQQQQQQQQQ": "1"}),
        refusal("--config", toml(tmp_path, "[server]\nlisten = '127.0.0.1:1'")),
    ):
        assert "did you mean" not in sentence


def test_options_may_not_be_shortened() -> None:
    """A short form that is unique today would mean something else tomorrow."""
    assert "--kv-bl" in refusal("--kv-bl", "4")


def test_variables_of_the_build_and_the_tests_are_no_settings() -> None:
    """A server would not start in the shell where it was built."""
    load_settings(
        [], {"KVLEDGER_CUDA": "ON", "KVLEDGER_TEST_MODEL": "x", "PATH": "y", "KVLEDGER_TOKEN": "z"}
    )


def test_the_same_setting_in_two_spellings_is_refused(tmp_path: Path) -> None:
    """Which of the two lines is in force would be a matter of luck."""
    path = toml(tmp_path, "token-budget = 100\ntoken_budget = 200\n")
    assert "token_budget is given twice" in refusal("--config", path)


def test_a_file_may_not_name_another_file(tmp_path: Path) -> None:
    """The second file would be ignored without a word."""
    assert "config is no setting" in refusal("--config", toml(tmp_path, 'config = "other.toml"'))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_queued = 1\nlisten = = 1", "line 2"),
        ('max_queued = "many"', "--max-queued: input should be a valid integer"),
        ("listen = 5", "--listen: input should be a valid string"),
        ("heartbeat_timeout = nan", "--heartbeat-timeout: input should be less than"),
        ("drain_timeout = inf", "--drain-timeout: input should be less than"),
        ("kv_bytes = -4", "--kv-bytes: could not parse"),
        ("token_budget = true", "--token-budget: it is no flag"),
        ("kv-bytes = false", "--kv-bytes: it is no flag"),
        ("tpot_target = true", "--tpot-target: it is no flag"),
        ("listen = true", "--listen: it is no flag"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, text: str, reason: str) -> None:
    """A person who mends a settings file must be told where it is wrong."""
    assert reason in refusal("--config", toml(tmp_path, text))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A binary named by mistake would end the start with a traceback."""
    path = tmp_path / "kvledger.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert f"--config {path}: " in refusal("--config", str(path))


@pytest.mark.parametrize("path", ["missing.toml", "", ".", "x" * 300])
def test_a_config_that_is_no_file_is_refused(path: str) -> None:
    """A server whose settings file is missing would start with the defaults, or a traceback."""
    assert "--config" in refusal("--config", path)
    assert "--config" in refusal(environment={"KVLEDGER_CONFIG": path})


def test_a_file_that_may_not_be_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A settings file of another user would end the start with a traceback."""
    path = toml(tmp_path, "max_queued = 1")

    def refuse(self: object, file_path: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(
        "kvledger.settings.TomlConfigSettingsSource._read_file", refuse, raising=True
    )
    assert refusal("--config", path) == f"--config {path}: Permission denied"


@pytest.mark.parametrize(
    ("listen", "address"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("0.0.0.0:65535", ("0.0.0.0", 65535)),
        ("localhost:50051", ("localhost", 50051)),
        ("my-host_1.example.org:80", ("my-host_1.example.org", 80)),
        ("[::1]:50051", ("::1", 50051)),
        ("[::]:0", ("::", 0)),
        ("[fe80::1%eth0]:7", ("fe80::1%eth0", 7)),
    ],
)
def test_addresses_that_can_be(listen: str, address: tuple[str, int]) -> None:
    """A server could not listen where its operator wants it to."""
    assert host_and_port(load_settings(["--listen", listen], {}).listen) == address


@pytest.mark.parametrize(
    "listen",
    [
        *("", ":", "host", "host:", ":50051", "50051", "host:port", "host:65536", "host:-1"),
        *("host:+1", "host: 1", "host:1 ", "host:\u0661", "host:123456", "host:1.5", "host:0x10"),
        *("::1:50051", "::", "[::1]", "[::1]50051", "[::1:50051", "::1]:50051", "[]:50051"),
        *("[zz]:50051", "[127.0.0.1]:1", "[[::1]]:1", "a b:1", " :1", "unix:a:1", "unix:///a:1"),
        *("http://host:1", "/run/socket:1", "host\n:1"),
        *("unix:", "unix:relative", "unix:/a b", "unix:/a%20", "unix:/a/"),
    ],
)
def test_addresses_that_cannot_be(listen: str) -> None:
    """gRPC would read nonsense in its own way, and listen where nobody expects it."""
    assert refusal("--listen", listen).startswith("--listen: ")


def test_a_unix_socket_can_be_listened_on() -> None:
    """Clients of the same machine would need a port that everybody there can reach."""
    assert load_settings(["--listen", "unix:/run/k/k.sock"], {}).listen == "unix:/run/k/k.sock"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tls-cert=c"], "--tls-cert needs --tls-key"),
        (["--tls-key=k"], "--tls-key needs --tls-cert"),
        (["--tls-client-ca=a"], "--tls-client-ca needs --tls-cert and --tls-key"),
        (["--tls-client-ca=a", "--tls-key=k"], "--tls-key needs --tls-cert"),
        (["--tls-cert=c", "--tls-key=k", "--listen=unix:/s"], "--tls-cert is for --listen host:"),
        (["--operators-client-ca=a"], "--operators-client-ca needs --operators-listen host:port"),
        (
            [
                "--operators-client-ca=a",
                "--tls-cert=c",
                "--tls-key=k",
                "--operators-listen=unix:/o",
            ],
            "--operators-client-ca needs --operators-listen host:port",
        ),
        (
            [
                *("--tls-client-ca=a", "--tls-cert=c", "--tls-key=k"),
                *("--operators-listen=h:1", "--listen=unix:/s"),
            ],
            "--tls-client-ca is for --listen host:port",
        ),
    ],
)
def test_half_of_tls_is_refused(arguments: list[str], reason: str) -> None:
    """A server would be open without TLS because one of three files was forgotten."""
    assert refusal(*arguments).startswith(reason)


def test_files_of_tls_come_with_their_settings() -> None:
    """A server would serve without the certificate that it was given."""
    assert load_settings([], {}).certificates() is None
    settings = load_settings(["--tls-cert=/nowhere/c", "--tls-key=/nowhere/k"], {})
    with pytest.raises(SettingRefused, match=r"^--tls-cert /nowhere/c: there is no such file$"):
        settings.certificates()


@pytest.mark.parametrize(
    ("arguments", "reflects"),
    [
        ([], False),
        (["--dev"], True),
        (["--dev", "--no-reflection"], False),
        (["--reflection"], True),
    ],
)
def test_reflection_follows_dev_unless_told(arguments: list[str], reflects: bool) -> None:
    """A server in production would describe itself to strangers, or never to its developers."""
    assert load_settings(arguments, {}).reflects is reflects


def test_flags_of_a_file_are_flags(tmp_path: Path) -> None:
    """The rule that refuses `token_budget = true` would refuse what is meant to be one."""
    settings = load_settings(["--config", toml(tmp_path, "dev = true\nreflection = false")], {})
    assert (settings.dev, settings.reflection) == (True, False)


def test_each_listener_has_an_address_of_its_own() -> None:
    """A start would fail late, after a model was loaded, or an address be taken for another."""
    settings = load_settings(["--metrics-listen", "127.0.0.1:9"], {})
    assert settings.addresses == {"--listen": "127.0.0.1:50051", "--metrics-listen": "127.0.0.1:9"}
    settings = load_settings(["--operators-listen", "none"], {})
    assert settings.addresses == {"--listen": "127.0.0.1:50051"}
    for option in ("--operators-listen", "--metrics-listen"):
        assert refusal(option, "127.0.0.1:50051").startswith(f"{option} 127.0.0.1:50051: --listen")
        assert refusal(option, "nonsense").startswith(f"{option}: 'nonsense' is neither")
        assert load_settings([option, "unix:/a", "--listen", "unix:/b"], {}).addresses[option]
    both = [
        "--listen=127.0.0.1:0",
        "--operators-listen=127.0.0.1:0",
        "--metrics-listen=127.0.0.1:0",
    ]
    assert len(load_settings(both, {}).addresses) == 3, "port 0 is another one each time"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], None),
        (["--operators-listen=unix:/o", "--metrics-listen=unix:/m"], None),
        (["--operators-listen=h:1"], "--operators-listen host:port needs --tls-cert"),
        (["--operators-listen=h:1", "--tls-cert=c", "--tls-key=k"], "--operators-client-ca"),
        (
            [*("--operators-listen=h:1", "--tls-cert=c", "--tls-key=k"), "--operators-client-ca=a"],
            None,
        ),
        (["--metrics-listen=h:1"], "--metrics-listen host:port is plain HTTP"),
    ],
)
def test_doors_of_operators_are_closed_without_dev(
    arguments: list[str], reason: str | None
) -> None:
    """Whoever reaches a port would be an operator."""
    load_settings(["--dev", *arguments], {}).require_closed_doors()
    settings = load_settings(arguments, {})
    if reason is None:
        settings.require_closed_doors()
        return
    with pytest.raises(SettingRefused) as refused:
        settings.require_closed_doors()
    assert reason in str(refused.value)


def test_brackets_are_asked_for() -> None:
    """Whoever writes an IPv6 address bare must be told how it is written."""
    assert "[::1]:50051" in refusal("--listen", "::1:50051")


@pytest.mark.parametrize("tokens", [8, 16, 32, 64, 128, 256])
def test_block_sizes_that_can_be(tokens: int) -> None:
    """A documented block size would be refused."""
    assert load_settings(["--block-tokens", str(tokens)], {}).block_tokens == tokens


@pytest.mark.parametrize("tokens", [-8, 0, 1, 4, 7, 24, 255, 257, 512])
def test_block_sizes_that_cannot_be(tokens: int) -> None:
    """The core would be asked for blocks that it cannot divide."""
    assert f"{tokens} is not a power of two from 8 to 256" in refusal(f"--block-tokens={tokens}")


def test_two_sizes_of_the_pool_contradict_each_other() -> None:
    """One of the two sizes would be ignored, wherever they come from."""
    assert "give one of them" in refusal("--kv-bytes", "1GiB", "--kv-blocks", "4")
    environment = {"KVLEDGER_KV_BLOCKS": "4"}
    assert "give one of them" in refusal("--kv-bytes", "1GiB", environment=environment)


def test_more_sequences_than_tokens_in_a_step_contradict_each_other() -> None:
    """Some running sequences would never get their token."""
    sentence = refusal("--token-budget", "15", "--max-sequences", "16")
    assert "15" in sentence
    assert "16" in sentence
    assert load_settings(["--token-budget", "16", "--max-sequences", "16"], {}).sequences_max == 16


@pytest.mark.parametrize(("budget", "sequences"), [(1, 1), (63, 63), (64, 64), (65, 64), (256, 64)])
def test_default_of_sequences_follows_a_small_budget(budget: int, sequences: int) -> None:
    """Lowering the token budget alone would be refused."""
    assert load_settings(["--token-budget", str(budget)], {}).sequences_max == sequences


@pytest.mark.parametrize(
    ("option", "least", "most"),
    [
        ("--kv-blocks", 1, 2**31 - 1),
        ("--token-budget", 64, 1 << 20),
        ("--max-sequences", 1, 256),
        ("--max-queued", 1, 1 << 20),
        ("--max-queued-tokens", 1, 1 << 40),
        ("--priority-aging", 0, 3600),
        ("--threads", 1, 1024),
        ("--max-connections", 1, 1 << 20),
        ("--drain-timeout", 0, 3600),
    ],
)
def test_numbers_stay_within_bounds(option: str, least: int, most: int) -> None:
    """A number that something below cannot bear would break the server instead of its start."""
    extra = ["--max-sequences", "64"] if option == "--token-budget" else []
    for value in (least, most):
        load_settings([f"{option}={value}", *extra], {})
    for value in (least - 1, most + 1):
        assert str(value) in refusal(f"{option}={value}", *extra)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "0", "600.001"])
def test_a_heartbeat_timeout_is_a_real_time(value: str) -> None:
    """Health would never change, or never be well: nothing is later than nan."""
    assert "--heartbeat-timeout" in refusal(f"--heartbeat-timeout={value}")


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("1KiB", 1024)]
)
def test_sizes_may_have_units(text: str, size: int) -> None:
    """A pool would be a thousand times too small, or refused, for a unit that people write."""
    assert load_settings(["--kv-bytes", text], {}).kv_bytes == size


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--weights", "int3"),
        ("--kv-format", "int4"),
        ("--device", "tpu"),
        ("--kernels", "mine"),
        ("--log-format", "xml"),
        ("--log-level", "loud"),
    ],
)
def test_a_choice_that_is_none_is_refused_with_the_choices(option: str, value: str) -> None:
    """A person who guesses must be told what there is."""
    sentence = refusal(option, value)
    assert sentence.startswith(f"{option}: ")
    assert "'" in sentence.partition("given")[0]
    assert f"given: '{value}'" in sentence


def test_identity_is_required_without_dev() -> None:
    """A server that cannot tell its callers apart would start where anybody can connect."""
    with pytest.raises(SettingRefused, match="--dev"):
        load_settings([], {}).require_identity()
    load_settings(["--dev"], {}).require_identity()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--tls-cert=c", "--tls-key=k"], "--tenants FILE"),
        (["--listen=unix:/x"], "--tenants FILE"),
        (["--tenants=t"], "--listen host:port needs --tls-cert"),
        (["--tenants=t", "--operators-listen=unix:/x"], "--listen host:port needs --tls-cert"),
        (["--tenants=t", "--listen=unix:/x"], None),
        (["--tenants=t", "--tls-cert=c", "--tls-key=k"], None),
        (["--tenants=t", "--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"], None),
    ],
)
def test_credentials_cross_no_network_in_the_clear(options: list[str], reason: str | None) -> None:
    """Whoever is on the line would be everybody who calls."""
    settings = load_settings(options, {})
    if reason is None:
        settings.require_identity()
    else:
        with pytest.raises(SettingRefused, match=reason):
            settings.require_identity()


def test_signed_tokens_need_tenants() -> None:
    """An issuer would name tenants that nobody knows."""
    assert "--tenants" in refusal("--jwt", "issuer.json")
    load_settings(["--jwt", "issuer.json", "--tenants", "t"], {})


@pytest.mark.parametrize(
    ("options", "clients", "operators"),
    [
        ([], "plain", "unix"),
        (["--listen=unix:/x"], "unix", "unix"),
        (["--tls-cert=c", "--tls-key=k"], "tls", "unix"),
        (["--tls-cert=c", "--tls-key=k", "--tls-client-ca=a"], "mutual_tls", "unix"),
        (["--tls-cert=c", "--tls-key=k", "--operators-listen=h:1"], "tls", "tls"),
        (
            [
                *("--tls-cert=c", "--tls-key=k", "--operators-listen=h:1"),
                "--operators-client-ca=a",
            ],
            "tls",
            "mutual_tls",
        ),
        (["--operators-listen=h:1"], "plain", "plain"),
    ],
)
def test_how_each_listener_is_reached(options: list[str], clients: str, operators: str) -> None:
    """A gateway would be believed where others are on the line."""
    settings = load_settings(options, {})
    found = (settings.transport.value, settings.operators_transport.value)
    assert found == (clients, operators)


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    """A setting that help does not name might as well not exist."""
    with pytest.raises(SystemExit) as ended:
        load_settings(["--help"], {}, "kvledger doctor")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "kvledger doctor" in shown
    for option in OPTIONS.values():
        assert option in shown
