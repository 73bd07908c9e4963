#!lua flags=no-writes
-- ARGV: turn_id, identity, first_chunk, with_request.
local head = read_head()
if not head then return {'none'} end
local now = clock_us()
local turns = read_turns(now)
local found = find_repeatable(turns, ARGV[2])
for _, turn in ipairs(turns) do
  if ARGV[2] == '' and turn.id == ARGV[1] then found = turn end
end
if not found then return {'none'} end
return show_turn(head, found, now, ARGV[3], ARGV[4] == '0')
