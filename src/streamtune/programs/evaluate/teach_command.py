"""``streamtune teach``: what a teacher says of a recipe's rows, written to a file to learn from without it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamtune.base.text import show_size
from streamtune.cli.console import err, loading_libraries, out, print_json, print_note
from streamtune.cli.options import JsonOption, RecipeArgument, SetOption, option, read_recipe
from streamtune.errors import ArgumentError
from streamtune.recipe.keys.loss import TEACHER_FILE


def teach(
    recipe: RecipeArgument,
    output: Annotated[Path, typer.Argument(metavar="OUT", help=f"The file to write, NAME{TEACHER_FILE}.")],
    top_k: Annotated[int, option("K", "Tokens of each target; 64 by default.", least=1)] = 64,
    set_: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the likeliest next tokens of a recipe's teacher at each token that is trained on.

    A run with this file as its teacher learns from them without the model: --set teacher=OUT.
    """
    if not output.name.endswith(TEACHER_FILE):
        raise ArgumentError(
            f"the name {output.name} does not end in {TEACHER_FILE}", where="OUT", mend=f"write {output}{TEACHER_FILE}"
        )
    if output.exists():
        raise ArgumentError(f"{output} is there already", where="OUT", mend="give another name, or remove it")
    if not output.absolute().parent.is_dir():
        raise ArgumentError(f"there is no folder {output.parent}", where="OUT", mend="make it first")
    loaded = read_recipe(recipe, set_)
    with loading_libraries():
        from streamtune.programs.evaluate.evaluate import Feedback
        from streamtune.programs.evaluate.teach import teach as ask
    for note in loaded.notes:
        print_note(note)
    with err.status("asking the teacher") as status:

        def progress(name: str, done: int, total: int) -> None:
            status.update(f"asking the teacher: {done:,} of {total:,} {name}")

        found = ask(loaded, output, top_k=top_k, feedback=Feedback(notify=print_note, progress=progress))
    if as_json:
        print_json(found)
        return
    out.print(
        f"{output}: {found['k']} likeliest tokens of {found['teacher']} at {found['targets']:,} targets of "
        f"{int(found['rows']):,} rows, {show_size(found['bytes'])}",
        soft_wrap=True,
        markup=False,
    )
    out.print(f"learn from it: --set teacher={output}", soft_wrap=True, markup=False)
