"""Questions that a package carries, as a task of lm-eval: MMLU's development set, five of each of 57 subjects.

    pip install 'lm-eval[api]'
    python benchmarks/packaged_questions.py DIR
    kizami evaluate http://A http://B --task mmlu_development --task-folder DIR --tokenizer MODEL --logs logs/

They stand in lm-eval's wheel as examples for other tasks; nothing is downloaded. A few hundred questions see a drop of
some points, no less: `kizami evaluate` says of how many.
"""

import argparse
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

CHOICES = re.compile(r"\(A\)(.*?)\(B\)(.*?)\(C\)(.*?)\(D\)(.*)", re.DOTALL)
ANSWER = re.compile(r"answer is \(([ABCD])\)")
TASK = """task: mmlu_development
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{question}}}}\\nAnswer:"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
target_delimiter: " "
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def questions() -> list[dict[str, Any]]:
    folder = files("lm_eval") / "tasks" / "mmlu" / "flan_cot_fewshot"
    found = []
    for file in sorted(folder.iterdir(), key=lambda file: file.name):
        if not file.name.startswith("mmlu_"):
            continue
        body = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        for sample in (body.get("fewshot_config") or {}).get("samples", []):
            made = question(sample, body["dataset_name"])
            if made is not None:
                found.append(made)
    return found


def question(sample: dict[str, str], subject: str) -> dict[str, Any] | None:
    """None where the text has not four choices and one answer in the usual form."""
    choices, answer = CHOICES.search(sample["question"]), ANSWER.search(sample["target"])
    if choices is None or answer is None:
        return None
    return {
        "subject": subject,
        "question": sample["question"][: choices.start()].strip(),
        "choices": [part.strip() for part in choices.groups()],
        "answer": "ABCD".index(answer[1]),
    }


class _Loader(yaml.SafeLoader):
    """lm-eval's own tags (!function) are left aside."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    found, data = questions(), (folder / "mmlu_development.jsonl").resolve()
    data.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found), encoding="utf-8")
    (folder / "mmlu_development.yaml").write_text(TASK.format(data=json.dumps(str(data))))
    print(f"{len(found)} questions of {len({one['subject'] for one in found})} subjects")


if __name__ == "__main__":
    main()
