"""One class for each format of table files; `dlrm.data.tables.files` lists them."""
