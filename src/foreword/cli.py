"""The command line: foreword generate | serve | demo | bench | replay.

Knows arguments, the terminal and exit codes; everything else is called. Logging is configured here and
nowhere else. Exit codes: 0 done, 1 a check of `demo` or `bench` failed, 2 a user's mistake, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from foreword import __version__
from foreword.config import Dtype, Environment, EvictionName, IndexName, KernelName, Policy
from foreword.errors import ConfigError, ForewordError, InvalidRequestError

if TYPE_CHECKING:
    from foreword.llm import LLM
    from foreword.request import RequestOutput, SamplingParams


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        logging.basicConfig(level=Environment.read().log_level, format="%(levelname)s %(name)s: %(message)s")
        _prepare_libraries()
        code: int = args.run(args)
        return code
    except ForewordError as error:
        print(f"foreword: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("foreword: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Whoever read our output has left; keep Python from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class _LateParser(argparse.ArgumentParser):
    """A command whose arguments may be known to a module, which is imported when the command is given.

    So other commands start sooner. The module has `add_arguments` and `run`.
    """

    module: str | None = None

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        if self.module is not None:
            module = importlib.import_module(self.module)
            self.module = None
            module.add_arguments(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(*args, **options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="foreword", description="LLM inference with automatic prefix caching.")
    parser.add_argument("--version", action="version", version=f"foreword {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_LateParser)

    generate = commands.add_parser("generate", help="continue prompts, or answer a chat message")
    _add_generate_arguments(generate)
    generate.set_defaults(run=_generate)

    serve = commands.add_parser("serve", help="answer over HTTP, in OpenAI's dialect")
    _add_serve_arguments(serve)
    serve.set_defaults(run=_serve)

    demo = commands.add_parser("demo", help="three workloads with and without the prefix cache, in a table")
    demo.add_argument("--json", action="store_true", help="print one JSON line instead of the table")
    demo.set_defaults(run=_demo)

    bench = commands.add_parser("bench", help="measurements on recorded traffic")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    trace = kinds.add_parser("trace", help="drive the engine with a Mooncake trace")
    trace.module = "foreword.bench.trace"
    calibration = kinds.add_parser("calibrate", help="measure the rates that `replay` needs to tell times")
    calibration.module = "foreword.bench.calibrate"

    replay = commands.add_parser(
        "replay", help="what caches of other sizes and policies would find of recorded traffic"
    )
    replay.module = "foreword.replay.command"
    return parser


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a Hugging Face causal LM")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument("--prompt-file", type=Path, action="append", default=[], help="file whose text to continue")
    parser.add_argument("--prompt-token-ids", action="append", default=[], metavar="IDS", help="such as 5,17,9")
    parser.add_argument("--chat", action="store_true", help="take each prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print one JSON line per prompt")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="say on standard error what the cache held of each prompt, why not more, and what attention shared",
    )

    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=128)
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--seed", type=int)
    sampling.add_argument("--stop", action="append", default=[], help="string that ends the answer")
    sampling.add_argument("--ignore-eos", action="store_true")

    _add_engine_arguments(parser)


def _add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument("--dtype", choices=get_args(Dtype))
    engine.add_argument("--device")
    engine.add_argument("--max-model-len", type=int)
    engine.add_argument("--kv-cache-memory-bytes", type=int)
    engine.add_argument("--gpu-memory-utilization", type=float)
    engine.add_argument("--block-size", type=int)
    engine.add_argument("--max-num-batched-tokens", type=int)
    engine.add_argument("--max-num-seqs", type=int)
    engine.add_argument("--long-prefill-token-threshold", type=int)
    engine.add_argument("--scheduling-policy", choices=get_args(Policy))
    engine.add_argument("--prefix-index", choices=get_args(IndexName))
    engine.add_argument("--eviction-policy", choices=get_args(EvictionName))
    engine.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
    engine.add_argument("--attention-kernel", choices=get_args(KernelName))
    engine.add_argument("--trust-remote-code", action="store_true", default=None)
    engine.set_defaults(engine_options=[action.dest for action in engine._group_actions])


def _add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder or hub id; the embedded model if left out")
    _add_engine_arguments(parser)
    server = parser.add_argument_group("server")
    server.add_argument("--host", help="address to listen on (default: 127.0.0.1, this machine alone)")
    server.add_argument("--port", type=int, help="default: 8000; 0: any free port")
    server.add_argument("--served-model-name", metavar="NAME", help="name that clients give")
    server.add_argument("--api-key", metavar="KEY", help="one key for everybody (or FOREWORD_API_KEY)")
    server.add_argument(
        "--operator-key", metavar="KEY", help="key that opens /dashboard and /metrics (or FOREWORD_OPERATOR_KEY)"
    )
    server.add_argument("--dashboard", action=argparse.BooleanOptionalAction, help="show /dashboard (default)")
    server.add_argument("--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry traces there")
    server.add_argument("--record", type=Path, metavar="FILE", help="record requests, not their text, for replay")
    server.add_argument("--keys-file", type=Path, metavar="FILE", help="TOML file of tenants and their keys")
    server.add_argument(
        "--share-prefix",
        type=Path,
        action="append",
        metavar="FILE",
        help="text with which prompts of all tenants may begin and share it; may be given several times",
    )
    server.add_argument("--max-queued", type=int, help="choices that may wait; more are refused with 429")
    server.add_argument("--max-body-bytes", type=int)
    server.add_argument("--max-prompt-tokens", type=int)
    server.add_argument("--request-timeout-s", type=float, metavar="SECONDS", help="most seconds of one request")
    server.add_argument("--shutdown-timeout-s", type=float, metavar="SECONDS", help="most seconds to finish in")
    server.set_defaults(server_options=[action.dest for action in server._group_actions])


def _serve(args: argparse.Namespace) -> int:
    try:
        from foreword.server.options import ServerConfig
        from foreword.server.run import serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"serving needs the package {error.name}; run `pip install foreword[serve]`") from error
    from foreword.demo.run import EMBEDDED_KV_BYTES, embedded_model

    environment = Environment.read()
    options = {name: getattr(args, name) for name in args.server_options if getattr(args, name) is not None}
    options.setdefault("api_key", environment.api_key)
    options.setdefault("operator_key", environment.operator_key)
    options["share_prefix"] = tuple(options.get("share_prefix", ()))
    engine_options = {name: getattr(args, name) for name in args.engine_options if getattr(args, name) is not None}
    with contextlib.ExitStack() as stack:
        model = args.model
        if model is None:
            model = str(stack.enter_context(embedded_model()))
            options.setdefault("served_model_name", "foreword-demo")
            engine_options.setdefault("kv_cache_memory_bytes", EMBEDDED_KV_BYTES)
        config = ServerConfig(**options, server_secret=environment.server_secret)
        with _without_garbage_collection():
            from foreword.llm import LLM

            llm = stack.enter_context(LLM(model, **engine_options))
        serve(llm, config)
    return 0


def _generate(args: argparse.Namespace) -> int:
    prompts = _prompts(args)
    from foreword.request import SamplingParams

    options = {name: getattr(args, name) for name in args.engine_options if getattr(args, name) is not None}
    params = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    with _without_garbage_collection():
        from foreword.llm import LLM

        llm = LLM(args.model, **options)
    with llm:
        if len(prompts) == 1 and not args.json and llm.tokenizer is not None:
            outputs = [_print_stream(llm, prompts[0], params, chat=args.chat)]
        else:
            outputs = _outputs(llm, prompts, params, chat=args.chat)
            for output in outputs:
                print(json.dumps(_as_json(output)) if args.json else _as_text(output))
        if args.explain:
            for output in outputs:
                _print_explanation(llm, output)
            print(f"foreword: {llm.explain_attention()}", file=sys.stderr)
    return 0


def _outputs(llm: LLM, prompts: list[Any], params: SamplingParams, *, chat: bool) -> list[RequestOutput]:
    if chat:
        return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    return llm.generate(prompts, params)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """For loading: libraries bring a million objects that stay, and looking at them again and again takes 0.5 s."""
    gc.disable()
    try:
        yield
        gc.freeze()
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
    shown = 0
    for output in outputs:
        text = output.outputs[0].text
        print(text[shown:], end="", flush=True)
        shown = len(text)
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
    """Settings that torch and transformers read once, when they are loaded.

    Model loading has progress bars of its own; they are noise beside ours. And OpenMP's threads wait for
    each other by spinning: when other programs want the processor too, a spinning thread uses up the time
    that the one it waits for needs (measured on a busy machine: the demo 8 times slower).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


if __name__ == "__main__":
    sys.exit(main())
