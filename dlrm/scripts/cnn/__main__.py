"""python -m dlrm.scripts.cnn"""

from dlrm.vision.command import start

if __name__ == "__main__":
    start()
