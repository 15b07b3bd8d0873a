"""python -m dlrm.scripts.bert"""

from dlrm.scripts.bert.command import start

if __name__ == "__main__":
    start()
