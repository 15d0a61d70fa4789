"""The command line: foreword generate | serve | models | demo | bench | replay | lint | pml | watch | cache.

Logging is configured only here. Exit codes: 0 for success, 1 if a check of `demo`, `bench` or `pml` failed, `cache`
found damage or the reader of the output left, 2 for a user's mistake, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import importlib
import itertools
import json
import logging
import os
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foreword import __version__
from foreword.config import Environment, engine_options, let_threads_rest, user_path
from foreword.config.flags import Flags, grouped, unknown_argument, with_hyphens
from foreword.config.option import options_of, pop_fields
from foreword.config.vllm import ENGINE_OPTIONS, SERVER_OPTIONS
from foreword.errors import ConfigError, ForewordError, InvalidRequestError, ModelLoadError, extra_for
from foreword.log_lines import JsonLines, LogConfig, PatientHandler, TextLines

if TYPE_CHECKING:
    from foreword import LLM, RequestOutput, SamplingParams


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    parser = _parser()
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            hint = _after_switch(unknown[0], args.parser, argv)
            raise ConfigError(f"{unknown_argument(unknown[0], args.parser)}{hint}")
        environment = Environment.read()
        options = args.flags.given(args) if "flags" in args else {}
        _configure_logging(LogConfig(**pop_fields(options, LogConfig)), environment.log_level or args.log_level)
        _prepare_libraries()
        code: int = args.run(args, options) if "flags" in args else args.run(args)
        return code
    except ForewordError as error:
        unread = args.given_model if isinstance(error, ModelLoadError) and "given_model" in args else None
        hint = "" if unread is None else _after_switch(unread, args.parser, argv)
        print(f"foreword: {type(error).__name__}: {error}{hint}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "foreword":
            raise
        remedy = "this installation lacks what foreword depends on; run `pip install foreword`, without --no-deps"
        print(f"foreword: ImportError: this command needs the package {error.name}; {remedy}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foreword: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has left.
        _silence_output()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        # Files that the user names raise foreword's own errors, so this is the output.
        print(
            f"foreword: the output cannot be written: {error}; free some space, or send it elsewhere", file=sys.stderr
        )
        _silence_output()
        return 2


def _silence_output() -> None:
    """Send what is left of the output nowhere, so that Python's last flush does not complain."""
    with contextlib.suppress(OSError):  # a program that calls `main` may have another kind of output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _after_switch(word: str, parser: argparse.ArgumentParser, argv: list[str] | None) -> str:
    """If `word` follows a flag that takes no value, return the end of an error message that says so; else empty."""
    switches = {flag for action in parser._actions if action.nargs == 0 for flag in action.option_strings}
    pairs = itertools.pairwise(with_hyphens(sys.argv[1:] if argv is None else argv))
    flag = next((before for before, after in pairs if after == word and before in switches), None)
    return "" if flag is None else f"; {flag} takes no value, so {word!r} is an argument of its own; leave it out"


def _configure_logging(config: LogConfig, default_level: str) -> None:
    """Log to standard error. Other packages log only warnings and errors, because some packages log every step."""
    level = (config.log_level or default_level).upper()
    logging.getLogger("foreword").setLevel(level)
    if logging.getLogger().handlers:  # the caller of main() has configured logging
        return
    handler = PatientHandler(sys.stderr)
    handler.setFormatter(JsonLines() if config.log_format == "json" else TextLines())
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelNamesMapping()[level]), handlers=[handler])


class _HelpLines(argparse.HelpFormatter):
    """Help lines that do not break flags at their hyphens."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _LateParser(argparse.ArgumentParser):
    """A command's parser. It imports the command's module only if the command is given, so that others start sooner."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, "formatter_class": _HelpLines, **options})
        self.later: Callable[[argparse.ArgumentParser], None] | None = None
        self.set_defaults(parser=self, log_level="WARNING")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.later is not None:
            add_arguments, self.later = self.later, None
            add_arguments(self)
        return super().parse_known_args(None if args is None else with_hyphens(args), namespace)


MODULES = {
    "models": (
        "model.checkpoint.gguf.unfold",
        "list the GGUF models of Ollama, LM Studio and Python packages on this machine",
    ),
    "bench trace": ("bench.trace", "drive the engine with a Mooncake trace"),
    "bench calibrate": ("bench.calibrate", "measure the rates that `replay` needs for times"),
    "bench kv-format": ("bench.kv_format", "measure what KV in eight bits changes, on your model and texts"),
    "replay": ("replay.command", "show what caches of other sizes and policies would find in recorded traffic"),
    "lint": ("lint.command", "show why recorded prompts part early, and what each remedy would save"),
    "keys": ("lint.keys", "print the block hashes that vLLM and SGLang give to a prompt"),
    "pml check": ("modules.check", "print a schema's layout, or the line and column where it is wrong"),
    "pml run": ("modules.run", "answer one prompt of a schema"),
    "pml measure": ("modules.measure", "measure what linking documents costs in right answers"),
    "watch": ("server.watch.command", "follow the cache of a running engine: foreword's, vLLM's or SGLang's"),
    "cache stats": ("tiers.upkeep.stats", "blocks, bytes, free space, and the processes that use the directory"),
    "cache list": ("tiers.upkeep.listing", "whose blocks lie there: model, arithmetic, size and age of each namespace"),
    "cache verify": ("tiers.upkeep.verify", "read every block and recompute every checksum"),
    "cache prune": ("tiers.upkeep.prune", "delete segments that are old, damaged, of other models, or too many"),
    "cache import": (
        "tiers.upkeep.import_file",
        "take the blocks of a prefix file into a directory, without loading a model",
    ),
}
"""Module and help text of each command that has its own module."""
FAMILIES = {
    "bench": (
        "BENCHMARK",
        "benchmarks",
        "measure the engine on recorded traffic, this machine's rates, and formats of KV",
    ),
    "pml": ("ACTION", "actions", "check a schema of prompt modules, answer a prompt of it, measure linking"),
    "cache": ("ACTION", "actions", "list, verify, prune, import and export what a cache directory holds"),
}
"""For each command of two words: the name of the second word, the title of its list, and the help text."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="foreword", description="LLM inference with automatic prefix caching.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"foreword {__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_LateParser)

    generate = commands.add_parser("generate", help="continue prompts, or answer a chat message")
    generate.later = _add_generate_arguments
    serve = commands.add_parser("serve", help="answer over HTTP, in the APIs of OpenAI, Anthropic, Gemini and Ollama")
    serve.later = _add_serve_arguments
    demo = commands.add_parser(
        "demo", help="run a real model and the shipped one, with the prefix cache and without it"
    )
    demo.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    demo.set_defaults(run=_demo)

    families: dict[str, Any] = {"": commands}
    for command, (module, text) in MODULES.items():
        family, _, name = command.rpartition(" ")
        if family not in families:
            metavar, title, about = FAMILIES[family]
            of_family = commands.add_parser(family, help=about)
            families[family] = of_family.add_subparsers(title=title, required=True, metavar=metavar)
        extra = "ops" if command == "watch" else ""
        families[family].add_parser(name, help=text).later = _arguments_of(f"foreword.{module}", extra)
    export = families["cache"].add_parser(
        "export", help="compute a prompt and write its cached blocks to a prefix file"
    )
    export.later = _add_export_arguments
    return parser


def _arguments_of(name: str, extra: str = "") -> Callable[[argparse.ArgumentParser], None]:
    """Return a function that adds a module's arguments. The module has `add_arguments` and `run`.

    `extra` is the pip extra with the module's packages.
    """

    def add(parser: argparse.ArgumentParser) -> None:
        with extra_for("this command", extra) if extra else contextlib.nullcontext():
            module = importlib.import_module(name)
        module.add_arguments(parser)
        parser.set_defaults(run=module.run)

    return add


MODEL_HELP = "GGUF file, folder, hub id, or a name that `foreword models` lists"
SAMPLING = "max_tokens temperature top_p top_k min_p seed stop ignore_eos".split()
"""Fields of SamplingParams that `generate` has flags for."""
SAMPLING_DEFAULTS = {"max_tokens": 128, "temperature": 0.0}
"""Defaults that differ from those of SamplingParams."""


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    from foreword import SamplingParams

    parser.add_argument("given_model", metavar="MODEL", nargs="?", help=MODEL_HELP)
    _add_prompts(parser, "continue", "; may be given several times")
    parser.add_argument("--chat", action="store_true", help="take each prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print one JSON line per prompt")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="print to standard error how much of each prompt was cached, why not more, and what attention shared",
    )
    fields = options_of(SamplingParams)
    sampling = {
        name: replace(fields[name], default=SAMPLING_DEFAULTS.get(name, fields[name].default)) for name in SAMPLING
    }
    engine = {name: option for name, option in engine_options().items() if name not in SAMPLING}
    flags = Flags({"sampling": sampling, **grouped({**engine, **options_of(LogConfig)})}, ENGINE_OPTIONS)
    flags.add_to(parser)
    parser.usage = "%(prog)s MODEL --prompt TEXT [OPTIONS]"
    parser.set_defaults(run=_generate, flags=flags)


def _add_prompts(parser: argparse.ArgumentParser, verb: str, more: str = "") -> None:
    several = partial(parser.add_argument, action="append", default=[])
    several("--prompt", help=f"text to {verb}{more}")
    several("--prompt-file", type=Path, help=f"file whose text to {verb}")
    several("--prompt-token-ids", metavar="IDS", help=f"token ids to {verb}, such as 5,17,9")


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("given_model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("file", metavar="FILE", type=Path, help="file to write, such as manual.fwkv")
    _add_prompts(parser, "compute")
    parser.add_argument("--with-text", action="store_true", help="write the prompt's token ids into the file too")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    flags = Flags(grouped({**engine_options(), **options_of(LogConfig)}), ENGINE_OPTIONS)
    flags.add_to(parser)
    parser.usage = "%(prog)s MODEL --prompt-file TEXT FILE [OPTIONS]"
    parser.set_defaults(run=_export, flags=flags, chat=False)


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from foreword.fleet.options import FleetConfig
    from foreword.server.options import ServerConfig

    parser.add_argument("given_model", metavar="MODEL", nargs="?", help=f"{MODEL_HELP}; without it the shipped model")
    engine = {**engine_options(), "model": replace(engine_options()["model"], default="the shipped model")}
    options = {**engine, **options_of(ServerConfig, FleetConfig, LogConfig)}
    flags = Flags(grouped(options), {**ENGINE_OPTIONS, **SERVER_OPTIONS})
    flags.add_to(parser)
    parser.usage = "%(prog)s [MODEL] [OPTIONS]"
    parser.set_defaults(run=_serve, flags=flags, log_level="INFO")


def _model(args: argparse.Namespace, options: dict[str, Any]) -> str | None:
    """Return the model, given as argument or as option. Raises ConfigError for two different models."""
    option: str | None = options.pop("model", None)
    argument: str | None = args.given_model
    if argument is not None and option is not None and argument != option:
        raise ConfigError(f"two models are given, {argument!r} and --model {option!r}; give one")
    return argument or option


def _serve(args: argparse.Namespace, options: dict[str, Any]) -> int:
    with extra_for("serving", "serve"):
        from foreword.fleet.options import FleetConfig
        from foreword.server.access.links import read_gate
        from foreword.server.options import ServerConfig
        from foreword.server.run import check_address, check_files, serve
    from foreword.demo.run import EMBEDDED_KV_BYTES, embedded_model

    environment = Environment.read()
    model = _model(args, options)
    server_options, fleet = pop_fields(options, ServerConfig), FleetConfig(**pop_fields(options, FleetConfig))
    for name in ("api_key", "operator_key", "server_secret"):
        server_options.setdefault(name, getattr(environment, name))
    with contextlib.ExitStack() as stack:
        if model is None:
            model = str(stack.enter_context(embedded_model()))
            server_options.setdefault("served_model_name", ("foreword-demo",))
            options.setdefault("kv_cache_memory_bytes", EMBEDDED_KV_BYTES)
        config = ServerConfig(**server_options)
        check_address(config.host, config.port)
        check_files(config)
        read_gate(config, allows_links=bool(options.get("allow_links")))  # reports mistakes in its file before loading
        if fleet.replicas:
            with extra_for(f"replicas={fleet.replicas}", "cluster"):
                from foreword.fleet.run import serve_replicas
            ends_in_order = serve_replicas(model, options, config, fleet)
        else:
            ends_in_order = serve(stack.enter_context(_load(model, options)), config)
    if not ends_in_order:  # everything is closed and written
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _generate(args: argparse.Namespace, options: dict[str, Any]) -> int:
    model, prompts = _model(args, options), _prompts(args)
    if model is None:
        raise ConfigError("no model is given; name a folder or a hub id")
    from foreword import SamplingParams

    sampling = {name: options.pop(name) for name in SAMPLING if name in options}
    params = SamplingParams(**{**SAMPLING_DEFAULTS, **sampling})
    with _load(model, options) as llm:
        if len(prompts) == 1 and not args.json and llm.tokenizer is not None:
            outputs = [_print_stream(llm, prompts[0], params, chat=args.chat)]
        else:
            chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(chats, params) if args.chat else llm.generate(prompts, params)
            for output in outputs:
                print(json.dumps(_as_json(output)) if args.json else _as_text(output))
        if args.explain:
            for output in outputs:
                _print_explanation(llm, output)
            print(f"foreword: {llm.explain_attention()}", file=sys.stderr)
    return 0


def _export(args: argparse.Namespace, options: dict[str, Any]) -> int:
    model, prompts = _model(args, options), _prompts(args)
    if len(prompts) != 1:
        raise InvalidRequestError(f"{len(prompts)} prompts are given, and a file holds one; give one")
    from foreword.tiers.prefix_file import check_target

    check_target(user_path(args.file), overwrite=args.overwrite)  # before minutes of loading
    with _load(model or args.given_model, options) as llm:
        report = llm.export_prefix(prompts[0], args.file, with_text=args.with_text, overwrite=args.overwrite)
    print(f"wrote {args.file}: {report.tokens:,} tokens in {report.blocks:,} blocks, {report.bytes:,} bytes")
    return 0


def _load(model: str, options: dict[str, Any]) -> LLM:
    """Load a model without garbage collection.

    Loading creates a million objects that stay. If the collector searched them again and again, it would take 0.5 s.
    """
    gc.disable()
    try:
        from foreword import LLM

        llm = LLM(model, **options)
        gc.freeze()
        return llm
    finally:
        gc.enable()


def _prompts(args: argparse.Namespace) -> list[Any]:
    texts = list(args.prompt)
    for path in args.prompt_file:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequestError(f"prompt file {str(path)!r} cannot be read as UTF-8 text: {error}") from error
    if args.chat and args.prompt_token_ids:
        raise InvalidRequestError("--chat needs text; give --prompt or --prompt-file instead of --prompt-token-ids")
    prompts: list[Any] = texts
    for ids in args.prompt_token_ids:
        try:
            prompts.append({"prompt_token_ids": [int(token_id) for token_id in ids.split(",")]})
        except ValueError as error:
            raise InvalidRequestError(f"--prompt-token-ids {ids!r} is not a list of numbers such as 5,17,9") from error
    if not prompts:
        raise InvalidRequestError("there is nothing to continue; give --prompt, --prompt-file or --prompt-token-ids")
    return prompts


def _print_stream(llm: LLM, prompt: Any, params: SamplingParams, *, chat: bool) -> RequestOutput:
    """Print one answer as its tokens arrive; returns the finished output."""
    outputs = llm.stream_chat([{"role": "user", "content": prompt}], params) if chat else llm.stream(prompt, params)
    num_printed = 0
    for output in outputs:
        text = output.outputs[0].text
        print(text[num_printed:], end="", flush=True)
        num_printed = len(text)
    print()
    return output


def _print_explanation(llm: LLM, output: RequestOutput) -> None:
    explanation = output.explanation
    if explanation is None:
        print("foreword: the prefix cache is off; nothing was looked up", file=sys.stderr)
        return
    print(f"foreword: {explanation}", file=sys.stderr)
    divergence = explanation.divergence
    if divergence is not None and divergence.theirs and llm.tokenizer is not None:
        for whose, token_ids in (("here", divergence.ours), ("cached", divergence.theirs)):
            print(f"    {whose + ':':8}{llm.tokenizer.decode(token_ids)!r}", file=sys.stderr)


def _as_text(output: RequestOutput) -> str:
    completion = output.outputs[0]
    return completion.text or " ".join(str(token_id) for token_id in completion.token_ids)


def _as_json(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "missed_because": output.explanation.reason if output.explanation else None,
        "ttft_ms": output.metrics.time_to_first_token_ms,
    }


def _demo(args: argparse.Namespace) -> int:
    from foreword.demo.run import run_demo

    return run_demo(as_json=args.json)


def _prepare_libraries() -> None:
    """Set variables that torch and transformers read once, on import.

    The libraries' progress bars of model loading would break our lines, so they are off.
    """
    let_threads_rest()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


if __name__ == "__main__":
    sys.exit(main())
