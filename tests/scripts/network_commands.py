"""Checks that the commands of image and of language networks share."""

import forked

FILES = ("dense.safetensors", "average.safetensors", "optimizer.safetensors")


def resumes_bit_for_bit(command, folder, options, stop, steps):
    """Checks that a run stopped at a step and resumed writes the files of a whole one."""
    whole = command(*options, "--save_checkpoint_path=whole")
    command(*options, "--save_checkpoint_path=cut", f"--max_steps={stop}")
    assert not list((folder / "cut").glob(f"step-*{steps}"))
    assert command(*options, "--save_checkpoint_path=cut", "--resume")
    assert whole["training_loss"]
    for file in FILES:
        one, two = (folder / d / f"step-{steps:09}" / file for d in ("whole", "cut"))
        assert one.read_bytes() == two.read_bytes(), file


def shows_flags_and_ends_with_an_error(module, *flags):
    """Checks the help of a command, and that an unknown mode is one line."""
    shown = forked.run(module, "--help").stdout
    for name in flags:
        assert name in shown
    done = forked.run(module, "--mode=fly")
    assert done.returncode == 1
    assert done.stderr.startswith("error: flag --mode=fly: value should be one of <")
