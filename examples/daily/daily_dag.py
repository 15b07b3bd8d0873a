"""A DAG of Airflow that learns a log day by day, and exports the model of the last day.

A task may be cleared and run again, also for an earlier date: `dlrm daily` learns nothing twice.
"""

import datetime

from airflow import DAG
from airflow.operators.bash import BashOperator

with DAG(
    "dlrm_daily",
    start_date=datetime.datetime(2026, 11, 1),
    schedule="15 6 * * *",
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 2, "retry_delay": datetime.timedelta(minutes=10)},
) as dag:
    learn = BashOperator(
        task_id="learn",
        bash_command="cd /srv/ctr && dlrm daily --config daily.yaml",
    )
    export = BashOperator(
        task_id="export",
        bash_command="cd /srv/ctr && dlrm export --checkpoint $(ls -d chain/days/*/run | sort -V | "
        "tail -n 1) --save-dir models $(test -d models/model && echo --update)",
    )
    learn >> export
