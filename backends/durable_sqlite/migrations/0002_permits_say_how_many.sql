-- A permit says how many of its scope were out with it, at most: so the newest one says how many there can be, and a claim need not count
-- (73). Both are NULL in what a version before wrote.
ALTER TABLE durable_permit ADD COLUMN number INTEGER;
ALTER TABLE durable_permit ADD COLUMN in_flight INTEGER;
CREATE INDEX durable_permit_newest ON durable_permit (scope, number);
