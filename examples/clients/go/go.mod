module kvstrata.io/client

go 1.22
