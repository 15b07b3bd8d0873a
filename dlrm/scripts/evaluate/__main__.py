"""python -m dlrm.scripts.evaluate"""

from dlrm.scripts.evaluate.command import start

if __name__ == "__main__":
    start()
