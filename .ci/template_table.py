"""Writes the table of chat templates in docs/benchmarks/templates.md: which messages each template shows.

    .venv/bin/python .ci/template_table.py FOLDER ...

Reads `*.jinja` and the `chat_template` of every `tokenizer_config.json` below the folders; a template is named after
its file or folder. Prints the table, and how many templates show everything.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from foreword.text.conversation import Conversation
from foreword.text.rendering import apply_template
from foreword.text.reply.format import choose_format
from foreword.text.template_probe import REASONING, SAMPLES, Probe, TemplateReport

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}


def templates(folder: Path) -> Iterator[tuple[str, str]]:
    """The name and the source of each template."""
    for path in sorted(folder.rglob("*.jinja")):
        yield path.parent.name if path.stem == "chat_template" else path.stem, path.read_text(encoding="utf-8")
    for path in sorted(folder.rglob("tokenizer_config.json")):
        found = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        named = found if isinstance(found, list) else [{"name": "", "template": found}] if found else []
        for one in named:
            yield f"{path.parent.name} {one['name']}".strip(), one["template"]


def row(name: str, family: str, report: TemplateReport) -> str:
    """One line of the table."""
    changes = ", ".join(f"{key}: {value}" for key, value in report.changes.items())
    if any(loss.refusal for loss in report.losses[:1]) and len(report.losses) == 1:
        return f"| {name} | {family} | | every conversation: {report.losses[0].refusal} |"
    return f"| {name} | {family} | {changes} | {', '.join(loss.kind for loss in report.losses)} |"


def main(folders: list[str]) -> None:
    """Print the table."""
    rows, num_given, num_shown = [], 0, 0
    for name, source in (one for folder in folders for one in templates(Path(folder))):
        form = choose_format(None, None, source)
        probe = Probe(
            lambda messages, inputs, source=source: apply_template(  # type: ignore[misc]
                source, Conversation(messages, inputs, messages[-1]["role"] != "assistant"), SPECIAL_TOKENS
            ),
            form,
        )
        report = probe.report()
        num_given += not {loss.kind for loss in report.as_given} - {REASONING.kind}
        num_shown += not report.lost_kinds() - {REASONING.kind}
        rows.append(("" if form is None else form.name, row(name, "" if form is None else form.name, report)))
    print("| template | family | rewritten | not shown |\n|---|---|---|---|")
    print("\n".join(line for _, line in sorted(rows)))
    print(
        f"\n{len(rows)} templates, {len(SAMPLES) - 1} kinds of conversations beside reasoning: {num_given} show all of "
        f"them as clients send them, {num_shown} in the form that the probe finds."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
