"""The API reference holds every public name, and the committed copy is fresh."""

import mp_agent
from tests.docs.pages import ROOT
from tools.generators.api_reference import api_reference_files, markdown
from tools.public_api import public_names


def test_every_public_name_has_a_section_with_its_parameters() -> None:
    (text,) = api_reference_files().values()
    sections = {part.partition("`")[0]: part for part in text.split("\n## `")[1:]}
    assert set(sections) == set(mp_agent.__all__) - {"__version__"}
    for entry in public_names():
        for field in entry.fields:
            assert f"| `{field.declaration}` |" in sections[entry.name]
    assert "process_group: ProcessGroup | DeviceMesh | None = None,\n" in sections["init"]


def test_indented_blocks_of_a_docstring_become_code() -> None:
    assert markdown("Call it\nonce::\n\n    f()\n    g()\n\nDone.") == (
        "Call it once:\n\n```python\nf()\ng()\n```\n\nDone."
    )


def test_the_committed_reference_is_fresh() -> None:
    for path, text in api_reference_files().items():
        assert (ROOT / path).read_text("utf-8") == text, "run `make generate`"
