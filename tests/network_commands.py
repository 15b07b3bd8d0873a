"""Checks that the commands of image and of language networks share."""

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
