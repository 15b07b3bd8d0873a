"""One class for each kind of files of tables; `dlrm.data.tables.files` lists them."""
