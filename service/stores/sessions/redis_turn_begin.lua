#!lua
-- ARGV: created_us, fence, holder, and the arguments of begin_record.
local head = read_head()
if not head then return {'not_found'} end
if not holds_lease(head, ARGV[1], ARGV[2], ARGV[3]) then return {'lease_lost'} end
local has_turns = redis.call('EXISTS', turns_key) == 1
local record, changes = begin_record(head, unpack(ARGV, 4))
if record[1] ~= 'begun' and record[1] ~= 'turn' then return answer(record[1]) end
write_head(head, changes, not has_turns)
return record[1] == 'begun' and answer('begun') or record
