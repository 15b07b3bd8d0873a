"""python -m dlrm.scripts.cnn"""

from dlrm.scripts.cnn.command import start

if __name__ == "__main__":
    start()
