"""Names in a served model, for the exporter, the server and the help of commands, without numpy."""

FACTS = "model.json"
ONNX = "model.onnx"  # a directory, if ONNX Runtime scores
KIND = "served model"  # of the manifest of a version
NUMERICAL, IDS, LENGTHS, WEIGHTS = "input__0", "input__1", "input__2", "input__3"
INPUTS = (NUMERICAL, IDS, LENGTHS, WEIGHTS)  # in the order of `Inputs`
RAW = "raw__0"
